// The threads of one parallel region: their shares of work, the barrier between phases, and the workspace's buffers.
//
// Owns: run_team (one region), Share (one thread's part of a number of items), Barrier, Buffers. Does not: allocate.
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
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace octavo {

// Up to this many tokens, each thread prepares every row for itself, which saves barriers; FEW in Python.
constexpr int64_t kPrivateRows = 4;

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

// Run `part(barrier, thread, threads)` on every thread of one region, whose threads may be fewer than `threads`.
template <typename Part>
void run_team(int64_t threads, const Part& part) {
#if defined(_OPENMP)
    if (threads > 1) {
        Barrier* barrier = nullptr;
#pragma omp parallel num_threads(static_cast<int>(threads))
        {
            const int count = omp_get_num_threads();
#pragma omp single
            barrier = new Barrier(count);
            part(*barrier, omp_get_thread_num(), count);
        }
        delete barrier;
        return;
    }
#endif
    Barrier barrier(1);
    part(barrier, 0, 1);
}

// Divides a workspace into buffers, each of whole cache lines.
class Buffers {
  public:
    explicit Buffers(void* memory) : start_(static_cast<char*>(memory)), at_(start_) {}

    static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

    template <typename T>
    T* take(int64_t count) {
        T* here = reinterpret_cast<T*>(at_);
        at_ += aligned(count * static_cast<int64_t>(sizeof(T)));
        return here;
    }

    // The buffer of one thread, among those of all threads.
    template <typename T>
    T* take_own(int64_t count, int64_t thread, int64_t threads) {
        const int64_t bytes = aligned(count * static_cast<int64_t>(sizeof(T)));
        return reinterpret_cast<T*>(take<char>(threads * bytes) + thread * bytes);
    }

    int64_t bytes() const { return at_ - start_; }

  private:
    char *start_, *at_;
};

}  // namespace octavo
