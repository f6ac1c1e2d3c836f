#include "thread_pool.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <system_error>

namespace kvtiers {

ThreadPool::ThreadPool(int num_workers) {
    // Signals are for the threads of the program; a new thread inherits this mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int i = 0; i < num_workers; ++i) workers_.emplace_back([this] { serve(); });
    } catch (const std::system_error &) {
        // No more threads to be had: run() works with those that there are.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ThreadPool::~ThreadPool() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (auto &worker : workers_) worker.join();
}

void ThreadPool::run(std::int64_t num_chunks, const std::function<void(std::int64_t)> &work) {
    auto task = std::make_shared<Task>();
    task->work = &work;
    task->num_chunks = num_chunks;
    {
        const std::lock_guard lock(mutex_);
        current_ = task;
        ++generation_;
    }
    wake_.notify_all();
    drain(*task);
    // Waits for chunks, not for workers: one that wakes late finds nothing left and is not missed.
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return task->finished.load() == num_chunks; });
    if (current_ == task) current_.reset();
}

void ThreadPool::drain(Task &task) {
    for (;;) {
        const std::int64_t chunk = task.next.fetch_add(1);
        if (chunk >= task.num_chunks) return;
        (*task.work)(chunk);
        if (task.finished.fetch_add(1) + 1 == task.num_chunks) {
            const std::lock_guard lock(mutex_);  // or the waiter could sleep just after its look
            finished_.notify_all();
        }
    }
}

void ThreadPool::serve() {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
        const std::shared_ptr<Task> task = current_;
        if (task == nullptr) continue;
        lock.unlock();
        drain(*task);
        lock.lock();
    }
}

ThreadPool &PoolHandle::get() {
    Owned *owned = owned_.load();
    // A parent's pool is left alone: its threads do not exist here, its mutex may be locked.
    while (owned == nullptr || owned->process != getpid()) {
        auto *made = new Owned{getpid(), ThreadPool(num_workers_)};
        if (owned_.compare_exchange_strong(owned, made)) return made->pool;
        delete made;  // another thread was first; `owned` is its pool
    }
    return owned->pool;
}

PoolHandle::~PoolHandle() {
    Owned *owned = owned_.load();
    if (owned != nullptr && owned->process == getpid()) delete owned;
}

}  // namespace kvtiers
