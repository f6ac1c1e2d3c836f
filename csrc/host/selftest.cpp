// Runs the copier without Python, for sanitizers; prints what differs and returns 1.
//
//   g++ -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -pthread
//       selftest.cpp block_copier.cpp cache.cpp stream_copy.cpp thread_pool.cpp -o selftest
//
// The same with -fsanitize=thread, and with -DKVTIERS_GENERIC for other architectures.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "block_copier.hpp"

namespace {

using namespace kvtiers;
using Bytes = std::vector<unsigned char>;
using Ids = std::vector<std::int64_t>;

int failures = 0;

void expect(bool holds, const char *what, const char *detail = "") {
    if (holds) return;
    std::printf("FAILED: %s %s\n", what, detail);
    ++failures;
}

std::uintptr_t address(Bytes &bytes) { return reinterpret_cast<std::uintptr_t>(bytes.data()); }

// A block is two runs in two allocations; sizes and offsets are odd on purpose.
struct World {
    std::int64_t num_blocks, piece, header, slot_nbytes, num_slots;
    Bytes first, second, slab;

    World(std::int64_t blocks, std::int64_t bytes)
        : num_blocks(blocks), piece(bytes), header(4096), slot_nbytes(header + 2 * bytes + 1 + 7),
          num_slots(blocks + 3),
          first(static_cast<std::size_t>(3 + blocks * (bytes + 5))),
          second(static_cast<std::size_t>(blocks * (bytes + 1))),
          slab(static_cast<std::size_t>(num_slots * slot_nbytes)) {
        std::mt19937 random(1);
        for (auto *bytes_of : {&first, &second})
            for (auto &byte : *bytes_of) byte = static_cast<unsigned char>(random());
    }

    std::vector<Run> runs() const {
        return {{0, 3, piece + 5, piece}, {1, 0, piece + 1, piece + 1}};
    }

    BlockCopier copier(int threads, std::int64_t stream_from, std::int64_t thread_from) {
        return BlockCopier({{address(first), static_cast<std::int64_t>(first.size())},
                            {address(second), static_cast<std::int64_t>(second.size())}},
                           {{runs(), num_blocks, header}},
                           {address(slab), num_slots, slot_nbytes},
                           {threads, stream_from, thread_from});
    }

    // The oracle: byte by byte, by its own arithmetic.
    unsigned char &in_block(std::int64_t block, std::int64_t at) {
        return at < piece ? first[static_cast<std::size_t>(3 + block * (piece + 5) + at)]
                          : second[static_cast<std::size_t>(block * (piece + 1) + at - piece)];
    }
    unsigned char &in_slot(std::int64_t slot, std::int64_t at) {
        return slab[static_cast<std::size_t>(slot * slot_nbytes + header + at)];
    }
};

void round_trip(std::int64_t blocks, std::int64_t piece, Method method, int threads) {
    World world(blocks, piece);
    auto copier = world.copier(threads, 0, 0);
    std::mt19937 random(2);
    Ids ids(static_cast<std::size_t>(blocks)), slots(static_cast<std::size_t>(world.num_slots));
    std::iota(ids.begin(), ids.end(), 0);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    std::shuffle(slots.begin(), slots.end(), random);
    slots.resize(ids.size());

    Bytes wanted = world.slab;
    std::swap(wanted, world.slab);
    for (std::size_t row = 0; row < ids.size(); ++row)
        for (std::int64_t at = 0; at < 2 * piece + 1; ++at)
            world.in_slot(slots[row], at) = world.in_block(ids[row], at);
    std::swap(wanted, world.slab);
    copier.copy(Direction::gather, 0, ids, slots, method, 0);
    expect(wanted == world.slab, "gather");

    const Bytes first = world.first, second = world.second;
    std::fill(world.first.begin(), world.first.end(), static_cast<unsigned char>(0));
    std::fill(world.second.begin(), world.second.end(), static_cast<unsigned char>(0));
    copier.copy(Direction::scatter, 0, ids, slots, method, 0);
    for (std::int64_t block = 0; block < blocks; ++block)
        for (std::int64_t pad = 0; pad < 5; ++pad)
            expect(world.first[static_cast<std::size_t>(3 + block * (piece + 5) + piece + pad)] == 0,
                   "scatter leaves padding");
    expect(world.second == second, "scatter, second allocation");
    for (std::int64_t block = 0; block < blocks; ++block)
        for (std::int64_t at = 0; at < piece; ++at) {
            const auto i = static_cast<std::size_t>(3 + block * (piece + 5) + at);
            if (world.first[i] != first[i]) return expect(false, "scatter, first allocation");
        }
}

template <typename Action>
void refuses(const char *what, const char *part, Action action) {
    try {
        action();
    } catch (const std::invalid_argument &error) {
        expect(std::string(error.what()).find(part) != std::string::npos, what, error.what());
        return;
    }
    expect(false, what, "was not refused");
}

void refusals() {
    World world(4, 100);
    auto copier = world.copier(1, 0, 0);
    const auto gather = [&](Ids ids, Ids slots) {
        copier.copy(Direction::gather, 0, ids, slots, Method::automatic, 0);
    };
    const Bytes before = world.slab;
    refuses("block id", "row 1: block id 4", [&] { gather({0, 4}, {0, 1}); });
    refuses("negative", "row 0: block id -1", [&] { gather({-1, 4}, {0, 1}); });
    refuses("huge", "row 0: slot", [&] { gather({1, 2}, {INT64_MAX, 1}); });
    refuses("lengths", "2 block ids but 1", [&] { gather({1, 2}, {1}); });
    refuses("duplicate", "row 1: slot 3", [&] { gather({1, 2}, {3, 3}); });
    refuses("group", "KV group 1", [&] {
        copier.copy(Direction::gather, 1, {}, {}, Method::automatic, 0);
    });
    expect(world.slab == before, "nothing moves before a refusal");

    const SlabShape slab{address(world.slab), 4, 8192};
    const auto build = [&](Run run, std::int64_t blocks, SlabShape shape) {
        BlockCopier({{address(world.first), 400}}, {{{run}, blocks, 4096}}, shape, {1, 0, 0});
    };
    refuses("run", "beyond", [&] { build({0, 1, 100, 100}, 4, slab); });
    refuses("overflow", "overflows", [&] { build({0, 0, INT64_MAX / 2, 1}, 4, slab); });
    refuses("overflow", "overflows", [&] { build({0, INT64_MAX, 1, 1}, 2, slab); });
    refuses("allocation", "allocation 1", [&] { build({1, 0, 100, 100}, 4, slab); });
    refuses("payload", "exceed", [&] { build({0, 0, 100, 100}, 4, {slab.address, 4, 4195}); });
    refuses("slab", "overflows", [&] { build({0, 0, 1, 1}, 4, {slab.address, 1L << 40, 1L << 40}); });
}

// Several threads use one copier at once, each with slots of its own.
void shared() {
    World world(64, 50'000);
    auto copier = world.copier(3, 0, 0);
    std::vector<std::thread> users;
    for (std::int64_t user = 0; user < 4; ++user)
        users.emplace_back([&, user] {
            Ids ids(16);
            std::iota(ids.begin(), ids.end(), 16 * user);
            for (int i = 0; i < 10; ++i)
                copier.copy(Direction::gather, 0, ids, ids, Method::automatic, 0);
        });
    for (auto &user : users) user.join();
    for (std::int64_t block = 0; block < 64; ++block)
        expect(world.in_slot(block, 100'000) == world.in_block(block, 100'000), "shared");
}

}  // namespace

int main() {
    for (const Method method : {Method::automatic, Method::memcpy, Method::sse2, Method::avx2}) {
        if (method != Method::automatic && copy_function(method) == nullptr) continue;
        for (const int threads : {1, 3})
            for (const std::int64_t piece : {1, 63, 100, 4095, 4096, 4200, 300'001})
                round_trip(7, piece, method, threads);
    }
    refusals();
    shared();
    std::printf(failures == 0 ? "all well\n" : "%d failures\n", failures);
    return failures == 0 ? 0 : 1;
}
