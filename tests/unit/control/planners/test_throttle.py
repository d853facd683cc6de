"""How many tokens a mixed step has, by live KV."""

import pytest

from pipemax.control.planners.throttle import PromptThrottle, step_sizes
from pipemax.domain.plan import Batching
from tests.unit.control.fake_engine import small_config


def throttle(step_tokens: int = 2048, **changes: float) -> PromptThrottle:
    """Return one for 100 GPU blocks, of which live KV may have six times as many."""
    return PromptThrottle(
        small_config(batching=Batching.MIXED, mixed_step_tokens=step_tokens, num_batches=4, **changes)
    )


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (48, (48,)),
        (200, (200, 192, 128)),
        (256, (256, 192, 128)),
        (300, (300, 256, 192, 128)),
        (1024, (1024, 768, 512, 256, 192, 128)),
        (2048, (2048, 1536, 1024, 768, 512, 256, 192, 128)),
    ],
)
def test_a_step_has_its_maximum_or_a_multiple_of_256_or_one_of_two_smaller_sizes(
    most: int, sizes: tuple[int, ...]
) -> None:
    assert step_sizes(most) == sizes


def test_steps_become_smaller_as_more_kv_waits_and_larger_again() -> None:
    policy = throttle()
    rising = {100: 2048, 200: 2048, 201: 1536, 250: 1024, 300: 768, 350: 512, 376: 256, 383: 192, 391: 128}
    assert {live: policy.step_tokens(live) for live in rising} == rising
    falling = {386: 192, 377: 256, 350: 512, 300: 768, 250: 1024, 200: 1536, 175: 2048}
    assert {live: policy.step_tokens(live) for live in falling} == falling


@pytest.mark.parametrize(("most", "at_tile_share"), [(256, 256), (384, 384), (512, 512), (192, 192)])
def test_steps_come_to_a_whole_tile_and_soon_after_to_the_least(most: int, at_tile_share: int) -> None:
    """The watermark of live KV is 600 blocks, or five GPU pools above the first one."""
    policy = throttle(most)
    assert policy.step_tokens(int(100 + 0.55 * 500)) == at_tile_share
    assert policy.step_tokens(int(100 + 0.58 * 500) + 1) == 128


def test_a_size_is_kept_while_live_kv_moves_a_little() -> None:
    policy = throttle()
    assert policy.step_tokens(210) == 1536
    assert [policy.step_tokens(live) for live in (195, 205, 190, 215, 181)] == [1536] * 5


def test_steps_keep_their_maximum_where_the_gpu_holds_all_live_kv() -> None:
    one_batch = PromptThrottle(small_config(batching=Batching.MIXED, mixed_step_tokens=2048, num_batches=1))
    small_host = throttle(host_blocks=100)
    assert {policy.step_tokens(1000) for policy in (one_batch, small_host)} == {2048}
