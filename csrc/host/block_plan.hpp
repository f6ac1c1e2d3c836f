// Where the bytes of blocks and slots lie, and what a batch must satisfy before they move.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvtiers {

enum class Direction { gather, scatter };

struct Memory {
    std::uintptr_t address;
    std::int64_t nbytes;
};

// Block b has the bytes [offset + b * block_stride, ... + nbytes) of an allocation.
struct Run {
    std::int64_t allocation, offset, block_stride, nbytes;
};

struct Group {
    std::vector<Run> runs;  // in payload order
    std::int64_t num_blocks;
    std::int64_t header_nbytes;  // the payload starts behind it
};

struct SlabShape {
    std::uintptr_t address;
    std::int64_t num_slots;
    std::int64_t slot_nbytes;
};

// A run in the process's address space.
struct Piece {
    std::uintptr_t base;  // of block 0, in the allocation
    std::int64_t block_stride;
    std::int64_t nbytes;
    std::int64_t payload_offset;
};
// A group, checked.
struct Plan {
    std::vector<Piece> pieces;
    std::int64_t num_blocks;
    std::int64_t header_nbytes;
    std::int64_t payload_nbytes;
};

// Throws std::invalid_argument.
[[noreturn]] void refuse(const std::string &message);

// "0..count-1"
std::string range_of(std::int64_t count);

// Throws std::invalid_argument if the slab has no slots, or its size overflows.
void check_slab(const SlabShape &slab);

// Throws std::invalid_argument if a run leaves its allocation for any valid block id,
// or a payload its slot.
Plan plan_of(const Group &group, const std::vector<Memory> &allocations, const SlabShape &slab);

// Returns the plan of a group. Throws std::invalid_argument if there is none.
const Plan &plan_at(const std::vector<Plan> &plans, std::int64_t group);

// Throws std::invalid_argument, with the row, if an id is out of range or a target named twice.
void check_rows(Direction direction, const Plan &plan, const SlabShape &slab,
                const std::vector<std::int64_t> &block_ids,
                const std::vector<std::int64_t> &slots);

}  // namespace kvtiers
