// The threads of one parallel region: their shares of work, how they wait for each other, and the workspace's buffers.
//
// Owns: run_team (one region), Team (a barrier, and phases of pieces that threads take from each other), Share (one
// thread's part of a number of items), Buffers. Does not: allocate workspaces.
// A barrier costs well under a microsecond while all threads run. A thread that waits longer sleeps, because only an
// idle core takes over a waiting thread, and two threads that spin on one core would share it for milliseconds.
// A phase of pieces ends when all pieces are done: a thread that has lost its core holds up its own piece alone, not the
// phases in which it has none.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
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

// One thread's contiguous share [first, end) of `count` items.
struct Share {
    int64_t first, end;

    Share(int64_t first_item, int64_t end_item) : first(first_item), end(end_item) {}
    Share(int64_t count, int thread, int threads)
        : first(count * thread / threads), end(count * (thread + 1) / threads) {}
};

// `count` threads. Each makes the same calls in the same order.
class Team {
  public:
    // How far a thread has come: one for each thread, which passes it to every `share_out`.
    struct Progress {
        uint32_t phase = 0, pieces = 0;
    };

    explicit Team(int count) : count_(count), taken_(new Taken[static_cast<size_t>(count)]) {}

    // Wait for all threads.
    void wait() {
        if (count_ == 1) return;
        const uint32_t turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1);  // sequentially consistent with `sleepers_`, so no thread misses it
            if (sleepers_.load() > 0) wake(turn_);
            return;
        }
        sleep_while(turn_, [turn](uint32_t now) { return now == turn; });
    }

    // Run work(piece) for each of `count` pieces: first those of the thread's own share, then what is left of others'.
    // Return when all are done. A phase that has ended without a thread is over for it at once.
    template <typename Work>
    void share_out(int thread, Progress& progress, int64_t count, const Work& work) {
        if (count_ == 1) {
            for (int64_t piece = 0; piece < count; ++piece) work(piece);
            return;
        }
        const uint64_t phase = ++progress.phase;
        const uint32_t all = progress.pieces += static_cast<uint32_t>(count);
        for (int turn = 0; turn < count_; ++turn) {
            const int owner = (thread + turn) % count_;
            const Share share(count, owner, count_);
            for (int64_t piece; (piece = take(taken_[owner].word, phase, share.end - share.first)) >= 0;) {
                work(share.first + piece);
                if (done_.fetch_add(1) + 1 == all && sleepers_.load() > 0) wake(done_);
            }
        }
        sleep_while(done_, [all](uint32_t now) { return static_cast<int32_t>(now - all) < 0; });
    }

  private:
    struct alignas(64) Taken {
        std::atomic<uint64_t> word{0};  // the phase, and how many pieces of it were taken
    };

    // Return the index of a piece that no thread has taken, or -1 if there is none, or the phase is over.
    static int64_t take(std::atomic<uint64_t>& word, uint64_t phase, int64_t size) {
        uint64_t seen = word.load(std::memory_order_acquire);
        while (true) {
            const uint64_t index = seen >> 32 == phase ? seen & 0xffffffff : 0;
            if (seen >> 32 > phase || static_cast<int64_t>(index) >= size) return -1;
            if (word.compare_exchange_weak(seen, phase << 32 | (index + 1), std::memory_order_acq_rel))
                return static_cast<int64_t>(index);
        }
    }

    template <typename IsEarly>
    void sleep_while(std::atomic<uint32_t>& word, const IsEarly& is_early) {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (!is_early(word.load(std::memory_order_acquire))) return;
            pause_briefly();
        }
        sleepers_.fetch_add(1);
        for (uint32_t now; is_early(now = word.load());) sleep(word, now);
        sleepers_.fetch_sub(1);
    }

#if defined(__linux__)
    static void sleep(std::atomic<uint32_t>& word, uint32_t seen) {
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    static void wake(std::atomic<uint32_t>& word) {
        syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
#else
    static void sleep(std::atomic<uint32_t>&, uint32_t) { sched_yield(); }
    static void wake(std::atomic<uint32_t>&) {}
#endif

    static constexpr int kSpins = 4000;
    const int count_;
    const std::unique_ptr<Taken[]> taken_;  // of each thread's share
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    alignas(64) std::atomic<uint32_t> done_{0};  // pieces since the start
    alignas(64) std::atomic<int> sleepers_{0};
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel reads the word");
};

// Run `part(team, thread, threads)` on every thread of one region, whose threads may be fewer than `threads`.
template <typename Part>
void run_team(int64_t threads, const Part& part) {
#if defined(_OPENMP)
    if (threads > 1) {
        std::unique_ptr<Team> team;
#pragma omp parallel num_threads(static_cast<int>(threads))
        {
            const int count = omp_get_num_threads();
#pragma omp single
            team.reset(new Team(count));
            part(*team, omp_get_thread_num(), count);
        }
        return;
    }
#endif
    Team team(1);
    part(team, 0, 1);
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
