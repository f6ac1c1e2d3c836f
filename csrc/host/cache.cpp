#include <algorithm>
#include <fstream>
#include <string>

#include "block_copier.hpp"

namespace kvtiers {
namespace {

// "32768K" or "32M" in bytes; 0 if it is neither.
std::int64_t parse_size(const std::string &text) {
    std::int64_t value = 0;
    std::size_t at = 0;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9' && at < 12; ++at)
        value = value * 10 + (text[at] - '0');
    const char unit = at < text.size() ? text[at] : '\0';
    return unit == 'K' ? value << 10 : unit == 'M' ? value << 20 : value;
}

}  // namespace

std::int64_t last_level_cache_nbytes() {
    std::int64_t largest = 0;
    for (int index = 0; index < 8; ++index) {
        const std::string folder =
            "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
        std::string size;
        if (!(std::ifstream(folder + "size") >> size)) break;
        largest = std::max(largest, parse_size(size));
    }
    return largest;
}

}  // namespace kvtiers
