// How memory, groups and columns cross from Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "block_plan.hpp"

namespace kvtiers {

using Int64s = nanobind::ndarray<const std::int64_t, nanobind::ndim<1>, nanobind::c_contig,
                                 nanobind::device::cpu>;
using RunTable = nanobind::ndarray<const std::int64_t, nanobind::shape<-1, 4>,
                                   nanobind::c_contig, nanobind::device::cpu>;
using GroupArguments = std::tuple<RunTable, std::int64_t, std::int64_t>;
using MemoryArguments = std::pair<std::uintptr_t, std::int64_t>;

inline std::vector<Memory> memories_of(const std::vector<MemoryArguments> &arguments) {
    std::vector<Memory> memories;
    for (const auto &[address, nbytes] : arguments) memories.push_back({address, nbytes});
    return memories;
}

inline std::vector<Group> groups_of(const std::vector<GroupArguments> &arguments) {
    std::vector<Group> groups;
    for (const auto &[table, num_blocks, header_nbytes] : arguments) {
        Group group{{}, num_blocks, header_nbytes};
        const std::int64_t *row = table.data();
        for (std::size_t i = 0; i < table.shape(0); ++i, row += 4)
            group.runs.push_back({row[0], row[1], row[2], row[3]});
        groups.push_back(std::move(group));
    }
    return groups;
}

// A copy: nobody can change an id after it was checked.
inline std::vector<std::int64_t> column_of(const Int64s &ids) {
    return {ids.data(), ids.data() + ids.size()};
}

}  // namespace kvtiers
