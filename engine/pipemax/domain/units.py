"""Ids that must not be confused, and byte sizes."""

from typing import NewType

RequestId = NewType("RequestId", str)
GpuBlockId = NewType("GpuBlockId", int)
HostBlockId = NewType("HostBlockId", int)

MIB = 1 << 20
GIB = 1 << 30


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator``, rounded up to an integer."""
    return -(-numerator // denominator)
