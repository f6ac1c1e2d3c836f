// Positioned vectored reads and writes, many at a time; knows nothing of Python.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvtiers {

struct IoBatch;

// One run of bytes in a file, scattered in memory. The memory is the caller's.
struct IoOp {
    int fd;
    bool writes;
    std::int64_t offset;
    std::vector<iovec> pieces;
    std::int64_t nbytes;      // of all pieces
    std::int64_t done = 0;    // bytes moved so far
    std::int64_t result = 0;  // bytes moved in the end, or -errno
    std::vector<iovec> rest{};  // what is left of the pieces, while a call is under way
    IoBatch *batch = nullptr;

    // Prepares `rest`. Returns the file offset of the first byte that is left.
    std::int64_t prepare();
    // Takes a call's count or -errno. Returns whether the operation is over; a short count
    // that may be continued is not: ENOSPC first shows up as one.
    bool advance(std::int64_t count);
};

struct IoBatch {
    std::int64_t id;
    std::vector<IoOp> ops;
    std::size_t num_pending;
};

// Takes batches and hands them back when all of their operations are over.
class FileIo {
  public:
    virtual ~FileIo() = default;
    virtual void submit(std::unique_ptr<IoBatch> batch) = 0;
    // Waits for what was submitted and ends all threads; idempotent.
    virtual void close() = 0;
    // Returns the finished batches since the last call, never waiting.
    std::vector<std::unique_ptr<IoBatch>> poll();

  protected:
    // Notes that one operation is over; with the mutex held.
    void finish(IoOp &op);

    std::mutex mutex_;
    std::vector<std::unique_ptr<IoBatch>> running_;
    std::vector<std::unique_ptr<IoBatch>> finished_;
};

// Blocking calls on threads of its own.
class ThreadedFileIo final : public FileIo {
  public:
    explicit ThreadedFileIo(int num_threads);
    ~ThreadedFileIo() override;
    void submit(std::unique_ptr<IoBatch> batch) override;
    void close() override;

  private:
    void serve();

    std::condition_variable wake_;
    std::deque<IoOp *> queue_;
    std::vector<std::thread> threads_;
    pid_t process_;
    bool stopping_ = false;
};

// Makes an io_uring engine of `depth` operations under way. Throws std::system_error where the
// kernel, or the container's profile, does not let it.
std::unique_ptr<FileIo> make_uring_io(unsigned depth);

}  // namespace kvtiers
