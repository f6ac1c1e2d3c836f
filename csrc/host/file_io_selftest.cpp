// Runs the file engines without Python, for sanitizers; prints what differs and returns 1.
//
//   g++ -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -pthread
//       file_io_selftest.cpp file_io.cpp uring_io.cpp -o selftest
//   ./selftest FILE [uring]
//
// The same with -fsanitize=thread, for the threads: it knows nothing of a kernel that writes rings.

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <system_error>

#include "file_io.hpp"

namespace {

using namespace kvtiers;

constexpr std::int64_t kPage = 4096, kBlocks = 64;

std::unique_ptr<IoBatch> batch_of(std::int64_t id, bool writes, int fd, std::vector<char> &memory,
                                  std::int64_t first, std::int64_t num) {
    auto batch = std::make_unique<IoBatch>();
    batch->id = id;
    for (std::int64_t i = first; i < first + num; i += 2) {
        IoOp op{fd, writes, i * kPage, {}, 2 * kPage};
        for (std::int64_t k = i; k < i + 2; ++k)
            op.pieces.push_back({memory.data() + k * kPage, kPage});
        batch->ops.push_back(std::move(op));
    }
    batch->num_pending = batch->ops.size();
    for (IoOp &op : batch->ops) op.batch = batch.get();
    return batch;
}

bool drain(FileIo &io, int wanted) {
    bool well = true;
    while (wanted > 0) {
        for (const auto &batch : io.poll()) {
            --wanted;
            for (const IoOp &op : batch->ops) well = well && op.result == op.nbytes;
        }
        usleep(100);
    }
    return well;
}

bool round_trip(FileIo &io, int fd) {
    std::vector<char> from(kBlocks * kPage), to(kBlocks * kPage);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i / 4096 + i % 251);
    for (int turn = 0; turn < 50; ++turn) {
        for (int i = 0; i < 4; ++i) io.submit(batch_of(i, true, fd, from, i * 16, 16));
        if (!drain(io, 4)) return false;
        std::memset(to.data(), 0, to.size());
        for (int i = 0; i < 8; ++i) io.submit(batch_of(i, false, fd, to, i * 8, 8));
        if (!drain(io, 8)) return false;
        if (from != to) return false;
    }
    io.submit(batch_of(9, false, fd, to, 0, 64));  // nobody waits for it
    io.close();
    io.close();
    return true;
}

}  // namespace

int main(int argc, char **argv) {
    const int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    std::unique_ptr<FileIo> io;
    try {
        if (argc > 2)
            io = make_uring_io(8);
        else
            io = std::make_unique<ThreadedFileIo>(8);
    } catch (const std::system_error &error) {
        std::printf("refused: %s\n", error.what());
        return 0;
    }
    const bool well = round_trip(*io, fd);
    std::puts(well ? "all well" : "other bytes than were written");
    return well ? 0 : 1;
}
