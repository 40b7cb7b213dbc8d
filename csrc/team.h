// The threads of one parallel region: their shares of work, and the barrier between phases.
//
// Owns: Share (one thread's part of a number of items) and Barrier. Does not: start threads (OpenMP does).
// A barrier costs well under a microsecond while all threads run. A thread that waits longer sleeps, because only an
// idle core takes over a waiting thread, and two threads that spin on one core would share it for milliseconds.

#pragma once

#include <atomic>
#include <cstdint>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A barrier for `count` threads, which may wait on it any number of times.
class Barrier {
  public:
    explicit Barrier(int count) : count_(count) {}

    void wait() {
        if (count_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1);  // sequentially consistent with `sleepers_`, so no thread misses it
            if (sleepers_.load() > 0) wake();
            return;
        }
        for (int spin = 0; spin < kSpins; ++spin) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            pause_briefly();
        }
        sleepers_.fetch_add(1);
        while (phase_.load() == phase) sleep(phase);
        sleepers_.fetch_sub(1);
    }

  private:
#if defined(__linux__)
    void sleep(uint32_t phase) { syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake() {}
#endif

    static constexpr int kSpins = 4000;
    const int count_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads the phase");
};

// One thread's contiguous share [first, end) of `count` items.
struct Share {
    int64_t first, end;

    Share(int64_t count, int thread, int threads)
        : first(count * thread / threads), end(count * (thread + 1) / threads) {}
};

}  // namespace octavo
