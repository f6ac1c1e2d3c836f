// io_uring by raw system calls: as fast as liburing, and nothing to link.
#include <cerrno>
#include <system_error>

#include "file_io.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits.h>

namespace kvtiers {
namespace {

[[noreturn]] void fail(const char *what) {
    throw std::system_error(errno, std::generic_category(), what);
}

// A file descriptor that is closed, and a mapping that is unmapped, with its owner.
struct Descriptor {
    int fd = -1;
    ~Descriptor() { close(); }
    void close() {
        if (fd >= 0) ::close(fd);
        fd = -1;
    }
};

struct Mapping {
    char *base = nullptr;
    std::size_t nbytes = 0;
    ~Mapping() {
        if (base != nullptr) munmap(base, nbytes);
    }
    void map(int fd, std::size_t size, std::uint64_t offset) {
        void *found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                           static_cast<off_t>(offset));
        if (found == MAP_FAILED) fail("mmap of an io_uring");
        base = static_cast<char *>(found);
        nbytes = size;
    }
    template <typename T>
    T *at(std::uint32_t offset) const {
        return reinterpret_cast<T *>(base + offset);
    }
};

using Shared = std::atomic<std::uint32_t>;  // a ring's index, the other end of which is the kernel
static_assert(sizeof(Shared) == sizeof(std::uint32_t));

class UringFileIo final : public FileIo {
  public:
    explicit UringFileIo(unsigned depth) : process_(getpid()), room_(depth) {
        io_uring_params params{};
        ring_.fd = static_cast<int>(syscall(__NR_io_uring_setup, depth + 1, &params));
        if (ring_.fd < 0) fail("io_uring_setup");
        const auto &sq = params.sq_off;
        const auto &cq = params.cq_off;
        submissions_.map(ring_.fd, sq.array + params.sq_entries * sizeof(std::uint32_t),
                         IORING_OFF_SQ_RING);
        completions_.map(ring_.fd, cq.cqes + params.cq_entries * sizeof(io_uring_cqe),
                         IORING_OFF_CQ_RING);
        entries_.map(ring_.fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
        sq_tail_ = submissions_.at<Shared>(sq.tail);
        sq_mask_ = *submissions_.at<std::uint32_t>(sq.ring_mask);
        sq_array_ = submissions_.at<std::uint32_t>(sq.array);
        cq_head_ = completions_.at<Shared>(cq.head);
        cq_tail_ = completions_.at<Shared>(cq.tail);
        cq_mask_ = *completions_.at<std::uint32_t>(cq.ring_mask);
        cqes_ = completions_.at<io_uring_cqe>(cq.cqes);
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        reaper_ = std::thread([this] { reap(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~UringFileIo() override { close(); }

    void submit(std::unique_ptr<IoBatch> batch) override {
        const std::lock_guard lock(mutex_);
        if (batch->ops.empty()) {
            finished_.push_back(std::move(batch));
            return;
        }
        for (IoOp &op : batch->ops) waiting_.push_back(&op);
        running_.push_back(std::move(batch));
        fill();
    }

    void close() override {
        if (!reaper_.joinable()) return;
        if (process_ != getpid()) {  // fork() took no threads along
            reaper_.detach();
            return;
        }
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            push(nullptr);
            enter();
        }
        reaper_.join();
        ring_.close();
    }

  private:
    // Moves waiting operations into the ring while it has room; with the mutex held.
    void fill() {
        bool pushed = false;
        while (room_ > 0 && !waiting_.empty()) {
            push(waiting_.front());
            waiting_.pop_front();
            --room_;
            pushed = true;
        }
        if (pushed) enter();
    }

    // Null is a no-operation, which wakes the reaper.
    void push(IoOp *op) {
        const std::uint32_t tail = sq_tail_->load(std::memory_order_relaxed);
        const std::uint32_t place = tail & sq_mask_;
        io_uring_sqe &entry = entries_.at<io_uring_sqe>(0)[place];
        entry = {};
        entry.opcode = IORING_OP_NOP;
        if (op != nullptr) {
            entry.off = static_cast<std::uint64_t>(op->prepare());
            entry.opcode = op->writes ? IORING_OP_WRITEV : IORING_OP_READV;
            entry.fd = op->fd;
            entry.addr = reinterpret_cast<std::uint64_t>(op->rest.data());
            entry.len = static_cast<std::uint32_t>(std::min<std::size_t>(op->rest.size(), IOV_MAX));
        }
        entry.user_data = reinterpret_cast<std::uint64_t>(op);
        sq_array_[place] = place;
        sq_tail_->store(tail + 1, std::memory_order_release);
        ++num_unsubmitted_;
    }

    // Tells the kernel of pushed entries; those that it does not take now go with the next call.
    void enter() {
        while (num_unsubmitted_ > 0) {
            const long taken =
                syscall(__NR_io_uring_enter, ring_.fd, num_unsubmitted_, 0, 0, nullptr, 0);
            if (taken > 0) num_unsubmitted_ -= static_cast<unsigned>(taken);
            if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) return;
            if (taken == 0) return;
        }
    }

    void reap() {
        for (;;) {
            syscall(__NR_io_uring_enter, ring_.fd, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
            const std::lock_guard lock(mutex_);
            std::uint32_t head = cq_head_->load(std::memory_order_relaxed);
            const std::uint32_t tail = cq_tail_->load(std::memory_order_acquire);
            for (; head != tail; ++head) {
                const io_uring_cqe &entry = cqes_[head & cq_mask_];
                auto *op = reinterpret_cast<IoOp *>(entry.user_data);
                if (op == nullptr) continue;
                ++room_;
                if (op->advance(entry.res))
                    finish(*op);
                else
                    waiting_.push_front(op);
            }
            cq_head_->store(head, std::memory_order_release);
            fill();
            if (stopping_ && running_.empty()) return;
        }
    }

    pid_t process_;
    unsigned room_;  // operations that may still be put under way
    unsigned num_unsubmitted_ = 0;
    bool stopping_ = false;
    Descriptor ring_;
    Mapping submissions_, completions_, entries_;
    Shared *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    std::uint32_t sq_mask_ = 0, cq_mask_ = 0;
    std::uint32_t *sq_array_ = nullptr;
    io_uring_cqe *cqes_ = nullptr;
    std::deque<IoOp *> waiting_;
    std::thread reaper_;
};

}  // namespace

std::unique_ptr<FileIo> make_uring_io(unsigned depth) {
    return std::make_unique<UringFileIo>(depth);
}

}  // namespace kvtiers

#else

namespace kvtiers {

std::unique_ptr<FileIo> make_uring_io(unsigned) {
    throw std::system_error(ENOSYS, std::generic_category(), "built without <linux/io_uring.h>");
}

}  // namespace kvtiers

#endif
