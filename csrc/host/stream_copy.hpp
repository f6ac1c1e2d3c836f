// Ways to copy one contiguous piece of memory.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace kvtiers {

enum class Method : int {
    automatic = 0,  // by size of batch and piece
    memcpy = 1,     // through the cache
    sse2 = 2,       // streaming stores of 16 bytes, past the cache
    avx2 = 3,       // streaming stores of 32 bytes
};

using CopyFunction = void (*)(void *target, const void *source, std::size_t nbytes);

// The function of a method; nullptr where this CPU or architecture has it not.
CopyFunction copy_function(Method method);

// The widest streaming method of this CPU; memcpy where there is none.
Method best_streaming_method();

// Makes streaming stores of this thread visible before any later store; call before
// telling another thread that a copy is done.
void streaming_fence();

// Names of the methods that this CPU has.
std::vector<std::string> available_methods();

}  // namespace kvtiers
