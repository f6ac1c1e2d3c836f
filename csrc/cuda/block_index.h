// Where every byte of a batch lies: the arithmetic of the copy kernels, on device and host alike.
// No header is included: NVRTC has none.
#pragma once

#if defined(__CUDACC__)
#define KVTIERS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVTIERS_HOST_DEVICE inline
#endif

namespace kvtiers {
namespace kernel {

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned int;

// Rows of one launch. They travel as kernel arguments, of which a launch takes 4096 bytes: no
// buffer of ids to allocate, to fill, or to keep until the copy is over.
constexpr u32 kMaxRows = 480;
constexpr u32 kLanes = 32;      // threads that share a tile
constexpr u32 kThreads = 512;   // of a thread block

// One run of every block.
struct Piece {
    u64 base;  // of block 0
    i64 block_stride;
    i64 nbytes;
    i64 payload_offset;
    i64 first_tile;  // tiles of the block that lie in earlier pieces
};

// Row i pairs block_ids[i] with slots[i].
struct Batch {
    const Piece *pieces;  // in payload order, in memory of the device
    u64 payloads;         // address of the payload of slot 0
    i64 slot_stride;
    i64 tile_nbytes;      // a multiple of 16
    i64 tiles_per_block;
    u32 num_pieces;
    u32 num_rows;
    u32 block_ids[kMaxRows];
    u32 slots[kMaxRows];
};
static_assert(sizeof(Batch) <= 4096, "more than a launch takes");

// A stretch of one piece of one row.
struct Tile {
    u64 in_block;
    u64 in_slot;
    i64 nbytes;
};

// Returns tile `unit` of the batch's num_rows * tiles_per_block.
KVTIERS_HOST_DEVICE Tile tile_of(const Batch &batch, i64 unit) {
    const i64 row = unit / batch.tiles_per_block;
    const i64 tile = unit - row * batch.tiles_per_block;
    u32 low = 0;
    u32 high = batch.num_pieces;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (batch.pieces[middle].first_tile <= tile)
            low = middle;
        else
            high = middle;
    }
    const Piece &piece = batch.pieces[low];
    const i64 skip = (tile - piece.first_tile) * batch.tile_nbytes;
    const i64 left = piece.nbytes - skip;
    const i64 in_block = static_cast<i64>(batch.block_ids[row]) * piece.block_stride + skip;
    const i64 in_slot =
        static_cast<i64>(batch.slots[row]) * batch.slot_stride + piece.payload_offset + skip;
    return {piece.base + static_cast<u64>(in_block), batch.payloads + static_cast<u64>(in_slot),
            left < batch.tile_nbytes ? left : batch.tile_nbytes};
}

// How two stretches are walked side by side: `head` bytes one by one, then `count` words of
// `width` bytes, aligned on both sides, then what is left one by one.
struct Walk {
    u32 width;
    i64 head;
    i64 count;
};

// Returns the widest walk that both addresses allow.
KVTIERS_HOST_DEVICE Walk walk_of(u64 first, u64 second, i64 nbytes) {
    const u64 apart = (first ^ second) | 16;
    const u32 width = static_cast<u32>(apart & (~apart + 1));  // the lowest bit: 1, 2, 4, 8 or 16
    i64 head = static_cast<i64>((~first + 1) & (width - 1));
    if (head > nbytes) head = nbytes;
    return {width, head, (nbytes - head) / width};
}

#if defined(__CUDACC__)
using Wide = ulonglong2;
#else
struct alignas(16) Wide {
    u64 x, y;
};
#endif

// Every byte is read once and written once: neither cache need keep it.
template <class Word>
KVTIERS_HOST_DEVICE Word read_once(const Word *from) {
#if defined(__CUDA_ARCH__)
    return __ldcs(from);
#else
    return *from;
#endif
}

template <class Word>
KVTIERS_HOST_DEVICE void write_once(Word *to, Word word) {
#if defined(__CUDA_ARCH__)
    __stcs(to, word);
#else
    *to = word;
#endif
}

// Copies one lane's share of `count` words; four loads are under way before the first store.
template <class Word>
KVTIERS_HOST_DEVICE void copy_words(u64 to, u64 from, i64 count, u32 lane) {
    Word *const target = reinterpret_cast<Word *>(to);
    const Word *const source = reinterpret_cast<const Word *>(from);
    i64 i = lane;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (; i + 3 * kLanes < count; i += 4 * kLanes) {
        const Word a = read_once(source + i);
        const Word b = read_once(source + i + kLanes);
        const Word c = read_once(source + i + 2 * kLanes);
        const Word d = read_once(source + i + 3 * kLanes);
        write_once(target + i, a);
        write_once(target + i + kLanes, b);
        write_once(target + i + 2 * kLanes, c);
        write_once(target + i + 3 * kLanes, d);
    }
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (; i < count; i += kLanes) write_once(target + i, read_once(source + i));
}

// Copies one lane's share of a tile.
KVTIERS_HOST_DEVICE void copy_stretch(u64 to, u64 from, i64 nbytes, u32 lane) {
    const Walk walk = walk_of(to, from, nbytes);
    const i64 body = walk.head + walk.count * walk.width;
    if (walk.head > 0) copy_words<unsigned char>(to, from, walk.head, lane);
    const u64 target = to + static_cast<u64>(walk.head);
    const u64 source = from + static_cast<u64>(walk.head);
    if (walk.width == 16)
        copy_words<Wide>(target, source, walk.count, lane);
    else if (walk.width == 8)
        copy_words<u64>(target, source, walk.count, lane);
    else if (walk.width == 4)
        copy_words<u32>(target, source, walk.count, lane);
    else if (walk.width == 2)
        copy_words<unsigned short>(target, source, walk.count, lane);
    else
        copy_words<unsigned char>(target, source, walk.count, lane);
    if (body < nbytes)
        copy_words<unsigned char>(to + static_cast<u64>(body), from + static_cast<u64>(body),
                                  nbytes - body, lane);
}

// What one thread does: group `warp` of `num_warps`, thread `lane` of it.
template <bool gather>
KVTIERS_HOST_DEVICE void copy_share(const Batch &batch, i64 warp, i64 num_warps, u32 lane) {
    const i64 units = batch.tiles_per_block * batch.num_rows;
    for (i64 unit = warp; unit < units; unit += num_warps) {
        const Tile tile = tile_of(batch, unit);
        if (gather)
            copy_stretch(tile.in_slot, tile.in_block, tile.nbytes, lane);
        else
            copy_stretch(tile.in_block, tile.in_slot, tile.nbytes, lane);
    }
}

}  // namespace kernel
}  // namespace kvtiers
