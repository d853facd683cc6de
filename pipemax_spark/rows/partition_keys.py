"""Send rows to the partitions that we choose, through Spark's hash partitioning."""

import functools
import itertools


@functools.cache
def partition_keys(partitions: int) -> tuple[int, ...]:
    """Return, for each partition, an int that Spark's hash partitioning sends there, to distribute rows explicitly."""
    keys: dict[int, int] = {}
    for key in itertools.count():
        keys.setdefault(_spark_hash(key) % partitions, key)
        if len(keys) == partitions:
            return tuple(keys[partition] for partition in range(partitions))
    raise AssertionError("unreachable: count never ends")


def _spark_hash(value: int) -> int:
    """Compute Spark's ``hash`` of an int: Murmur3 of four bytes with seed 42, as a signed number of 32 bits."""
    mask = 0xFFFFFFFF
    mixed = value * 0xCC9E2D51 & mask
    mixed = (mixed << 15 | mixed >> 17) & mask
    hashed = 42 ^ (mixed * 0x1B873593 & mask)
    hashed = (hashed << 13 | hashed >> 19) & mask
    hashed = (hashed * 5 + 0xE6546B64) & mask
    hashed ^= 4
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & mask
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & mask
    hashed ^= hashed >> 16
    return hashed - 2**32 if hashed >= 2**31 else hashed
