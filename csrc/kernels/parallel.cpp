#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace {

enum { MOST_WORKERS = 255 };

struct Job {
    void (*task)(void*, int64_t);
    void* context;
    int64_t parts;
    std::atomic<int64_t> next{0};

    void work() {
        for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) task(context, part);
    }
};

void work_on(void* job) { static_cast<Job*>(job)->work(); }

// What compilers make of `omp parallel`: calls the function on so many threads, and returns when all have. GNU's
// run-time has it, and so have those of LLVM and Intel.
typedef void (*gomp_parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

// A child of fork has none of the threads that its copy of the run-time counts on.
std::atomic<bool> is_forked{false};

gomp_parallel loaded_openmp() {
    static std::atomic<gomp_parallel> known{nullptr};
    if (is_forked.load(std::memory_order_relaxed)) return nullptr;
    gomp_parallel found = known.load(std::memory_order_relaxed);
    if (!found) {
        found = reinterpret_cast<gomp_parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
        known.store(found, std::memory_order_relaxed);
    }
    return found;
}

// [Note: Worker seats of a job]
// A job lives on its caller's stack. The caller opens `seats` on it; a worker takes a seat and is counted in `seated`
// until it leaves, both under the mutex. The caller works too, and when it finds no part left it closes the seats and waits
// for `seated` to reach zero: workers that woke too late find no seat and never see the job. A worker that
// sleeps on a busy core is not waited for.
class Pool {
  public:
    void run(Job& job, int32_t helpers) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return job.work();
        if (const gomp_parallel parallel = loaded_openmp()) return parallel(work_on, &job, (unsigned)helpers + 1, 0);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (workers_ < helpers && start_worker()) workers_++;
            job_ = &job;
            seats_ = helpers < workers_ ? helpers : workers_;
        }
        wake_.notify_all();
        job.work();
        std::unique_lock<std::mutex> lock(mutex_);
        seats_ = 0;
        left_.wait(lock, [this] { return seated_ == 0; });
    }

  private:
    bool start_worker() {
        try {
            // Detached and never joined: a process may end while they sleep.
            std::thread(&Pool::serve, this).detach();
            return true;
        } catch (const std::system_error&) {
            return false;
        } catch (const std::bad_alloc&) {
            return false;
        }
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return seats_ > 0; });
            seats_--;
            seated_++;
            Job* const job = job_;
            lock.unlock();
            job->work();
            lock.lock();
            if (--seated_ == 0) left_.notify_one();
        }
    }

    std::mutex turn_;  // held by the one caller whose job is open
    std::mutex mutex_;
    std::condition_variable wake_, left_;
    Job* job_ = nullptr;
    int32_t workers_ = 0, seats_ = 0, seated_ = 0;
};

// Never freed: sleeping threads use it until the process ends. A child of fork has the parent's locks in any state and
// none of its threads; it makes its pool in the same memory again.
alignas(Pool) unsigned char room[sizeof(Pool)];

void make_pool() { new (room) Pool; }

void in_child() {
    is_forked.store(true, std::memory_order_relaxed);
    make_pool();
}

Pool& pool() {
    static const bool made = (make_pool(), pthread_atfork(nullptr, nullptr, in_child), true);
    (void)made;
    return *std::launder(reinterpret_cast<Pool*>(room));
}

}  // namespace

void parallel_for(int64_t parts, int32_t threads, void (*task)(void*, int64_t), void* context) {
    Job job{task, context, parts};
    int64_t helpers = (threads < parts ? threads : parts) - 1;
    if (helpers > MOST_WORKERS) helpers = MOST_WORKERS;
    if (helpers > 0)
        pool().run(job, (int32_t)helpers);
    else
        job.work();
}
