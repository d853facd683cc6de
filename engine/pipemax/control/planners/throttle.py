"""Fills mixed steps with prompts by memory: what in the paper switches phases throttles prefill here.

A prompt is begun while the host pool's reservations, with it, stay below the high watermark, and while live KV is
below a watermark of its own. One GPU pool of live KV is on the GPU; the rest is parked, and the prefetch chooses from
it. More parked KV would not improve the choice, and the prompts' tokens would be missing later, when they could fill
the steps. Prompts that are begun go on.

Before that, steps become smaller. Large steps compute prompts faster than their decodes end, so live KV grows until
prompts must wait; the steps then have few decodes and nothing else. So the maximum of a step falls with live KV, until
prompts come as fast as outputs end.
"""

from collections.abc import Sequence

from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.phase import MemoryLoad, PhasePolicy
from pipemax.domain.plan import Phase, PhaseReason
from pipemax.domain.tuned import (
    THROTTLE_FINE_SIZES,
    THROTTLE_FIRST_SHARE,
    THROTTLE_LEAST_SHARE,
    THROTTLE_TILE_SHARE,
    THROTTLE_WHOLE_TILE,
)


class PromptThrottle(PhasePolicy):
    """Chooses whether mixed steps begin prompts, and how many tokens they have; the phase is always the same."""

    def __init__(self, config: ControllerConfig) -> None:
        super().__init__(config)
        # Where nothing is overwritten, parked requests come back only as others end: the GPU should hold all.
        num_pools = (
            config.mixed_live_watermark if config.overwrites else min(1.0, config.mixed_live_watermark)
        )
        self._live_blocks = num_pools * config.gpu_blocks
        self._sizes = step_sizes(config.step_tokens)
        self._size_index = 0
        parked_blocks = min(self._live_blocks, self._high_blocks) - config.gpu_blocks
        borders = _borders(self._sizes) if parked_blocks > 0 else []
        self._shrink_at = [config.gpu_blocks + border * parked_blocks for border, _ in borders]
        """Live KV above which steps leave each size for the next smaller one."""
        self._grow_at = [config.gpu_blocks + (border - band / 2) * parked_blocks for border, band in borders]
        """Live KV below which they come back: half a band of hysteresis."""

    def choose(self, phase: Phase, load: MemoryLoad) -> tuple[Phase, PhaseReason]:
        """Return why the next step begins prompts (FILL_HOST), or why it begins none."""
        return Phase.MIXED, self._reason(load)

    def _reason(self, load: MemoryLoad) -> PhaseReason:
        if load.num_waiting == 0:
            idle = load.num_prefilling == load.num_decodable == 0
            return PhaseReason.START if idle else PhaseReason.INPUT_USED_UP
        if not load.next_fits:
            return PhaseReason.HOST_FULL
        if load.num_decodable and load.live_blocks >= self._live_blocks:
            return PhaseReason.ENOUGH_PARKED
        return PhaseReason.FILL_HOST

    def step_tokens(self, live_blocks: int) -> int:
        """Return the maximum tokens of the next step.

        Hysteresis keeps a size for many steps: steps of equal tokens keep all stages busy.
        """
        while self._size_index < len(self._shrink_at) and live_blocks > self._shrink_at[self._size_index]:
            self._size_index += 1
        while self._size_index > 0 and live_blocks < self._grow_at[self._size_index - 1]:
            self._size_index -= 1
        return self._sizes[self._size_index]

    def admission_demand_blocks(self, phase: Phase, load: MemoryLoad) -> int:
        """Return how many more blocks of input fit, beyond what waits already; negative if more waits than fits.

        At least a refill may wait, also while the host pool is full: steps go on taking prompts as requests end.
        """
        reserved = min(load.reserved_blocks, self._high_blocks - int(self._refill_blocks))
        return self._high_blocks - reserved - load.waiting_blocks


def step_sizes(most_tokens: int) -> tuple[int, ...]:
    """Return the sizes that a mixed step may have, descending: its maximum, 256·2ⁿ and 768·2ⁿ, and 192 and 128.

    A step's time grows in jumps, one for each tile of a matrix product, which multiples of 256 fill.
    """
    doublings = [THROTTLE_WHOLE_TILE << n for n in range(most_tokens.bit_length())]
    whole = {size for least in doublings for size in (least, 3 * least)}
    return (
        most_tokens,
        *sorted((size for size in whole | {*THROTTLE_FINE_SIZES} if size < most_tokens), reverse=True),
    )


def _borders(sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Return, between each size and the next smaller one, the share of parked KV and the width of a size's band."""
    num_smaller = len(sizes) - 1
    num_fine = min(num_smaller, sum(size < THROTTLE_WHOLE_TILE for size in sizes))
    num_whole = num_smaller - num_fine
    whole_band = (THROTTLE_TILE_SHARE - THROTTLE_FIRST_SHARE) / max(1, num_whole - 1)
    fine_band = (THROTTLE_LEAST_SHARE - THROTTLE_TILE_SHARE) / max(1, num_fine)
    whole = [(THROTTLE_TILE_SHARE - n * whole_band, whole_band) for n in reversed(range(num_whole))]
    return whole + [(THROTTLE_TILE_SHARE + n * fine_band, fine_band) for n in range(1, num_fine + 1)]
