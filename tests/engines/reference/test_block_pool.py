"""The block pool keeps what it can of the past, and forgets the right thing first."""

import random
import tracemalloc

import pytest

from kvtiers.engines.reference.block_pool import NULL_BLOCK, BlockPool
from kvtiers.model.errors import ProtocolError

HASHES = [bytes([i]) * 32 for i in range(9)]


def test_the_null_block_is_nobodys():
    pool = BlockPool(5)
    assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in range(1, 6)
    with pytest.raises(ProtocolError, match="1 blocks are wanted, 0 are free"):
        pool.take(1)


def test_a_free_block_is_hit_until_it_is_handed_out():
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.cache(blocks, HASHES, 0, 3)
    pool.free(blocks)
    assert pool.hit(HASHES, 9) == blocks
    assert pool.hit(HASHES, 2) == blocks[:2]
    pool.take(2)  # the one that was never used, and the tail of what was let go
    assert pool.hit(HASHES, 9) == blocks[:2]


def test_a_hit_is_held_again_and_counts():
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.cache(blocks, HASHES, 0, 2)
    pool.hold(blocks[:1])
    pool.free(blocks)
    assert (pool.num_free, pool.refs(blocks[0])) == (2, 1)
    assert pool.num_free_among(blocks) == 1
    pool.hold(blocks)
    pool.free(blocks)
    pool.free(blocks[:1])
    assert pool.num_free == 3
    with pytest.raises(ProtocolError, match="nobody holds it"):
        pool.free(blocks[:1])


def test_a_run_is_forgotten_with_its_first_block_that_goes():
    pool = BlockPool(6, blocks_per_hash=2)
    blocks = pool.take(5)
    pool.cache(blocks, HASHES, 0, 2)
    assert pool.hit(HASHES, 9) == blocks[:4]
    pool.free(blocks)
    pool.take(3)  # one never used, one behind the last run, and that run's last block
    assert pool.hit(HASHES, 9) == blocks[:2]


def test_equal_content_is_cached_once():
    pool = BlockPool(4)
    one, two = pool.take(1), pool.take(1)
    pool.cache(one, HASHES, 0, 1)
    pool.cache(two, HASHES, 0, 1)
    assert pool.hit(HASHES, 1) == one
    pool.free(one)
    pool.take(3)
    assert pool.hit(HASHES, 1) == []
    pool.cache(two, HASHES, 0, 1)
    assert pool.hit(HASHES, 1) == two
    pool.forget_all()
    assert pool.refs(two[0]) == 1  # whoever holds a block keeps it
    assert (pool.hit(HASHES, 1), pool.num_cached) == ([], 0)


def test_the_longest_free_leave_first_however_often_hits_took_them_out():
    """Against a plain list of the free ones."""
    rng, pool, free, held = random.Random(0), BlockPool(12), list(range(1, 13)), []
    for _ in range(2000):
        match rng.randrange(3):
            case 0 if free:
                num = rng.randint(1, len(free))
                assert pool.take(num) == free[:num]
                held.append(free[:num])
                del free[:num]
            case 1 if free:
                hit = rng.sample(free, rng.randint(1, min(3, len(free))))
                pool.hold(hit)
                held.append(hit)
                free = [block_id for block_id in free if block_id not in hit]
            case 2 if held:
                blocks = held.pop(rng.randrange(len(held)))
                pool.free(blocks)
                free += reversed(blocks)
        assert pool.num_free == len(free)


def test_of_what_others_hold_too_the_tail_leaves_first_once_all_let_go():
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.hold(blocks[:1])
    pool.free(blocks)
    assert pool.take(2) == [blocks[2], blocks[1]]


def test_hits_that_come_and_go_take_no_memory():
    pool = BlockPool(4)
    pool.free(pool.take(4))

    def hit(num):
        for _ in range(num):
            pool.hold([2])
            pool.free([2])

    hit(100)
    tracemalloc.start()
    hit(10_000)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 10_000
