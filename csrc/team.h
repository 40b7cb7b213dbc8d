// The threads of one parallel region: their shares of work, and the barrier between phases.
//
// Owns: Share (which part of so many items is a thread's) and Barrier. Does not: start threads (OpenMP does).
// A barrier here costs well under a microsecond while all threads run; one that waits long yields its core, so that a
// machine with other load still gets on.

#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
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

// Sense-reversing barrier of `count` threads; it may be waited on any number of times.
class Barrier {
  public:
    explicit Barrier(int count) : count_(count) {}

    void wait() {
        if (count_ == 1) return;
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spin = 0; phase_.load(std::memory_order_acquire) == phase; ++spin) {
            if (spin < kSpins)
                pause_briefly();
            else
                sched_yield();
        }
    }

  private:
    static constexpr int kSpins = 2000;
    const int count_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

// The contiguous share [first, end) of `count` items of one thread.
struct Share {
    int64_t first, end;

    Share(int64_t count, int thread, int threads)
        : first(count * thread / threads), end(count * (thread + 1) / threads) {}
};

}  // namespace octavo
