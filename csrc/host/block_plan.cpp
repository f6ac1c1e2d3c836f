#include "block_plan.hpp"

#include <algorithm>
#include <stdexcept>

namespace kvtiers {
namespace {

void check_ids(const char *noun, const std::vector<std::int64_t> &ids, std::int64_t count) {
    for (std::size_t row = 0; row < ids.size(); ++row)
        if (ids[row] < 0 || ids[row] >= count)
            refuse("row " + std::to_string(row) + ": " + noun + " " + std::to_string(ids[row]) +
                   " is not in " + range_of(count));
}

// Ids must be in range already. One bit per id: 128 KiB for a million of them.
void check_distinct(const char *noun, const std::vector<std::int64_t> &ids, std::int64_t count) {
    std::vector<std::uint64_t> seen(static_cast<std::size_t>(count) / 64 + 1);
    for (std::size_t row = 0; row < ids.size(); ++row) {
        const auto id = static_cast<std::uint64_t>(ids[row]);
        const std::uint64_t bit = std::uint64_t{1} << (id % 64);
        if (seen[id / 64] & bit) {
            const auto first = std::find(ids.begin(), ids.end(), ids[row]) - ids.begin();
            refuse("row " + std::to_string(row) + ": " + noun + " " + std::to_string(ids[row]) +
                   " is already the target of row " + std::to_string(first));
        }
        seen[id / 64] |= bit;
    }
}

std::int64_t checked_product(std::int64_t a, std::int64_t b, const char *what) {
    std::int64_t product;
    if (__builtin_mul_overflow(a, b, &product)) refuse(std::string(what) + " overflows 64 bits");
    return product;
}

std::int64_t checked_sum(std::int64_t a, std::int64_t b, const char *what) {
    std::int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) refuse(std::string(what) + " overflows 64 bits");
    return sum;
}

}  // namespace

void refuse(const std::string &message) { throw std::invalid_argument(message); }

std::string range_of(std::int64_t count) { return "0.." + std::to_string(count - 1); }

void check_slab(const SlabShape &slab) {
    if (slab.num_slots < 1 || slab.slot_nbytes < 1)
        refuse("slab of " + std::to_string(slab.num_slots) + " slots of " +
               std::to_string(slab.slot_nbytes) + " bytes");
    checked_product(slab.num_slots, slab.slot_nbytes, "the slab's size");
}

Plan plan_of(const Group &group, const std::vector<Memory> &allocations, const SlabShape &slab) {
    Plan plan{{}, group.num_blocks, group.header_nbytes, 0};
    if (group.num_blocks < 1 || group.header_nbytes < 0)
        refuse(std::to_string(group.num_blocks) + " blocks, a header of " +
               std::to_string(group.header_nbytes) + " bytes");
    for (const Run &run : group.runs) {
        const auto count = static_cast<std::int64_t>(allocations.size());
        if (run.allocation < 0 || run.allocation >= count)
            refuse("allocation " + std::to_string(run.allocation) + " is not in " +
                   range_of(count));
        const Memory &memory = allocations[static_cast<std::size_t>(run.allocation)];
        if (run.offset < 0 || run.block_stride < 0 || run.nbytes < 1)
            refuse("run at offset " + std::to_string(run.offset) + ", stride " +
                   std::to_string(run.block_stride) + ", " + std::to_string(run.nbytes) +
                   " bytes");
        const std::int64_t last =
            checked_product(group.num_blocks - 1, run.block_stride, "a block's offset");
        const std::int64_t end = checked_sum(
            checked_sum(run.offset, last, "a block's offset"), run.nbytes, "a run's end");
        if (end > memory.nbytes)
            refuse("run at offset " + std::to_string(run.offset) + " ends at " +
                   std::to_string(end) + ", beyond the allocation's " +
                   std::to_string(memory.nbytes) + " bytes");
        plan.pieces.push_back({memory.address + static_cast<std::uintptr_t>(run.offset),
                               run.block_stride, run.nbytes, plan.payload_nbytes});
        plan.payload_nbytes = checked_sum(plan.payload_nbytes, run.nbytes, "the payload");
    }
    if (plan.payload_nbytes > slab.slot_nbytes - plan.header_nbytes)
        refuse("header and payload of " + std::to_string(plan.header_nbytes) + " + " +
               std::to_string(plan.payload_nbytes) + " bytes exceed the slot's " +
               std::to_string(slab.slot_nbytes));
    return plan;
}

void check_rows(Direction direction, const Plan &plan, const SlabShape &slab,
                const std::vector<std::int64_t> &block_ids,
                const std::vector<std::int64_t> &slots) {
    if (block_ids.size() != slots.size())
        refuse(std::to_string(block_ids.size()) + " block ids but " +
               std::to_string(slots.size()) + " slots");
    check_ids("block id", block_ids, plan.num_blocks);
    check_ids("slot", slots, slab.num_slots);
    // Two writes to one target would race, and one of the rows would hold the other's bytes.
    if (direction == Direction::gather)
        check_distinct("slot", slots, slab.num_slots);
    else
        check_distinct("block id", block_ids, plan.num_blocks);
}

const Plan &plan_at(const std::vector<Plan> &plans, std::int64_t group) {
    const auto count = static_cast<std::int64_t>(plans.size());
    if (group < 0 || group >= count)
        refuse("KV group " + std::to_string(group) + " is not in " + range_of(count));
    return plans[static_cast<std::size_t>(group)];
}

}  // namespace kvtiers
