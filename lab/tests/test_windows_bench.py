"""``lab.bench.windows``: how much of the rows' KV would be kept if windows were freed."""

import numpy as np
import pytest

from lab.bench.windows import kept_share
from pipemax.domain.specs import KvCapacity
from pipemax.sim.workloads import Workload


def rows_of(prompt: int, output: int) -> Workload:
    return Workload(
        name="equal",
        prompt_tokens=np.full(10, prompt),
        output_tokens=np.full(10, output),
        shared_prefix_tokens=0,
    )


def test_long_rows_keep_the_window_and_short_ones_pay_for_the_gaps() -> None:
    """Six layers, of which five have a window of 64 tokens, in blocks of one layer."""
    whole = KvCapacity(block_tokens=16, gpu_blocks=100, host_blocks=1)
    freed = whole.with_freed_windows([(0, 6)], (5,), window_tokens=64)
    assert (freed.gpu_blocks, freed.groups.count) == (600, 6)
    # 1,600 tokens are 100 blocks in the full group, and 4 in each of five window groups.
    assert kept_share(whole, freed, rows_of(1500, 200)) == pytest.approx((100 + 5 * 4) / 600)
    assert kept_share(whole, freed, rows_of(20, 8)) == pytest.approx(1.0)
    two_stages = whole.with_freed_windows([(0, 3), (3, 6)], (5,), window_tokens=64)
    assert kept_share(whole, two_stages, rows_of(20, 8)) == pytest.approx(2.0), "half of each block is empty"
