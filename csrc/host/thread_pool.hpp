// Threads that outlive a batch: starting one costs about 46 us.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvtiers {

// Belongs to the process that made it: see `PoolHandle`.
class ThreadPool {
  public:
    // Starts its threads; fewer where the system refuses more, down to none.
    explicit ThreadPool(int num_workers);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool &operator=(const ThreadPool &) = delete;

    // Calls work(0) .. work(num_chunks - 1), each once, on the workers and on this thread;
    // returns when all have returned. Any thread may call it at any time; `work` must not throw.
    void run(std::int64_t num_chunks, const std::function<void(std::int64_t)> &work);

  private:
    struct Task {
        const std::function<void(std::int64_t)> *work;
        std::int64_t num_chunks;
        std::atomic<std::int64_t> next{0};
        std::atomic<std::int64_t> finished{0};
    };
    void serve();
    void drain(Task &task);

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable finished_;
    std::shared_ptr<Task> current_;  // a late worker may still hold it after run() has returned
    std::uint64_t generation_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

// Makes the pool on first use, anew in a child process: fork() takes no threads along.
class PoolHandle {
  public:
    explicit PoolHandle(int num_workers) : num_workers_(num_workers) {}
    ~PoolHandle();
    PoolHandle(const PoolHandle &) = delete;
    PoolHandle &operator=(const PoolHandle &) = delete;

    ThreadPool &get();

  private:
    struct Owned {
        pid_t process;
        ThreadPool pool;
    };
    int num_workers_;
    std::atomic<Owned *> owned_{nullptr};
};

}  // namespace kvtiers
