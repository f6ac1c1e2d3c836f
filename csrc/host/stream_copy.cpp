#include "stream_copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

// KVTIERS_GENERIC builds what other architectures get, to compile and test it on x86.
#if defined(__x86_64__) && !defined(KVTIERS_GENERIC)
#define KVTIERS_X86 1
#include <immintrin.h>
#endif

namespace kvtiers {
namespace {

void plain(void *target, const void *source, std::size_t nbytes) {
    std::memcpy(target, source, nbytes);
}

#ifdef KVTIERS_X86

constexpr std::size_t kLine = 64;

// Copies up to the target's next cache line, so that whole lines are streamed after it:
// a line written in part costs a read of the rest.
std::size_t copy_head(char *target, const char *source, std::size_t nbytes) {
    const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(target) % kLine;
    const std::size_t head = misaligned == 0 ? 0 : std::min(nbytes, kLine - misaligned);
    std::memcpy(target, source, head);
    return head;
}

void stream_sse2(void *to, const void *from, std::size_t nbytes) {
    auto *target = static_cast<char *>(to);
    const auto *source = static_cast<const char *>(from);
    std::size_t at = copy_head(target, source, nbytes);
    for (; at + kLine <= nbytes; at += kLine) {
        const auto *in = reinterpret_cast<const __m128i *>(source + at);
        auto *out = reinterpret_cast<__m128i *>(target + at);
        const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
        const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    std::memcpy(target + at, source + at, nbytes - at);
}

__attribute__((target("avx2"))) void stream_avx2(void *to, const void *from, std::size_t nbytes) {
    constexpr std::size_t step = 2 * kLine;
    auto *target = static_cast<char *>(to);
    const auto *source = static_cast<const char *>(from);
    std::size_t at = copy_head(target, source, nbytes);
    for (; at + step <= nbytes; at += step) {
        const auto *in = reinterpret_cast<const __m256i *>(source + at);
        auto *out = reinterpret_cast<__m256i *>(target + at);
        const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
        const __m256i c = _mm256_loadu_si256(in + 2), d = _mm256_loadu_si256(in + 3);
        _mm256_stream_si256(out, a);
        _mm256_stream_si256(out + 1, b);
        _mm256_stream_si256(out + 2, c);
        _mm256_stream_si256(out + 3, d);
    }
    std::memcpy(target + at, source + at, nbytes - at);
}

#endif

}  // namespace

CopyFunction copy_function(Method method) {
    switch (method) {
        case Method::memcpy:
            return plain;
#ifdef KVTIERS_X86
        case Method::sse2:  // part of every x86-64
            return stream_sse2;
        case Method::avx2:
            return __builtin_cpu_supports("avx2") ? stream_avx2 : nullptr;
#endif
        default:
            return nullptr;
    }
}

Method best_streaming_method() {
    for (const Method method : {Method::avx2, Method::sse2})
        if (copy_function(method) != nullptr) return method;
    return Method::memcpy;
}

void streaming_fence() {
#ifdef KVTIERS_X86
    _mm_sfence();
#endif
}

std::vector<std::string> available_methods() {
    std::vector<std::string> names;
    if (copy_function(Method::memcpy) != nullptr) names.emplace_back("memcpy");
    if (copy_function(Method::sse2) != nullptr) names.emplace_back("sse2");
    if (copy_function(Method::avx2) != nullptr) names.emplace_back("avx2");
    return names;
}

}  // namespace kvtiers
