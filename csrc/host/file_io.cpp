#include "file_io.hpp"

#include <cerrno>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <limits.h>
#include <system_error>

namespace kvtiers {

namespace {
constexpr std::int64_t kSector = 512;  // direct I/O never continues inside of one
}

std::int64_t IoOp::prepare() {
    rest.clear();
    std::int64_t skip = done;
    for (const iovec &piece : pieces) {
        const auto length = static_cast<std::int64_t>(piece.iov_len);
        if (skip >= length) {
            skip -= length;
            continue;
        }
        rest.push_back({static_cast<char *>(piece.iov_base) + skip,
                        static_cast<std::size_t>(length - skip)});
        skip = 0;
    }
    return offset + done;
}

bool IoOp::advance(std::int64_t count) {
    if (count == -EINTR || count == -EAGAIN) return false;
    if (count < 0) {
        result = count;
        return true;
    }
    done += count;
    result = done;
    if (done >= nbytes) return true;
    if (count == 0) {
        if (writes) result = -ENOSPC;  // a file system that takes nothing and says nothing
        return true;
    }
    return !writes && (offset + done) % kSector != 0;  // the end of a file that was cut
}

std::vector<std::unique_ptr<IoBatch>> FileIo::poll() {
    std::vector<std::unique_ptr<IoBatch>> found;
    const std::lock_guard lock(mutex_);
    found.swap(finished_);
    return found;
}

void FileIo::finish(IoOp &op) {
    IoBatch *batch = op.batch;
    if (--batch->num_pending > 0) return;
    const auto found = std::find_if(running_.begin(), running_.end(),
                                    [&](const auto &other) { return other.get() == batch; });
    finished_.push_back(std::move(*found));
    running_.erase(found);
}

ThreadedFileIo::ThreadedFileIo(int num_threads) : process_(getpid()) {
    // Signals are for the threads of the program; a new thread inherits this mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error &) {
        if (threads_.empty()) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        // Fewer threads than asked for: a smaller queue depth.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ThreadedFileIo::~ThreadedFileIo() { close(); }

void ThreadedFileIo::submit(std::unique_ptr<IoBatch> batch) {
    const std::size_t num_ops = batch->ops.size();
    {
        const std::lock_guard lock(mutex_);
        if (num_ops == 0) {
            finished_.push_back(std::move(batch));
            return;
        }
        for (IoOp &op : batch->ops) queue_.push_back(&op);
        running_.push_back(std::move(batch));
    }
    // As many as there is work for, and none of them into a locked mutex.
    for (std::size_t i = 0; i < std::min(num_ops, threads_.size()); ++i) wake_.notify_one();
}

void ThreadedFileIo::close() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    if (process_ != getpid()) {  // fork() took no threads along
        for (auto &thread : threads_) thread.detach();
        threads_.clear();
    }
    for (auto &thread : threads_) thread.join();
    threads_.clear();
}

void ThreadedFileIo::serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        IoOp &op = *queue_.front();
        queue_.pop_front();
        lock.unlock();
        ssize_t count;
        do {
            const std::int64_t offset = op.prepare();
            const int num = static_cast<int>(std::min<std::size_t>(op.rest.size(), IOV_MAX));
            count = op.writes ? pwritev(op.fd, op.rest.data(), num, offset)
                              : preadv(op.fd, op.rest.data(), num, offset);
        } while (!op.advance(count < 0 ? -errno : count));
        lock.lock();
        finish(op);
    }
}

}  // namespace kvtiers
