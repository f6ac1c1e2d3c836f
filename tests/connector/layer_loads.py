"""A load of two blocks in three ranges of layers."""

from kvtiers.model.keys import block_key, group_of

NUM_RANGES = 3
HASHES = [bytes([i]) * 32 for i in (1, 2)]
KEYS = [block_key(one, group) for group in range(NUM_RANGES) for one in HASHES]  # range by range
GROUPS = [group_of(key) for key in KEYS]
BLOCKS = [4, 5] * NUM_RANGES
SOON = 30.0  # seconds; a limit that only a failure reaches
