"""Fills mixed steps with prompts by memory: what in the paper switches phases throttles prefill here.

A prompt is begun while the host pool's reservations, with it, stay below the high watermark, and while live KV is
below a watermark of its own. One GPU pool of live KV is on the GPU; the rest is parked, and the prefetch chooses from
it. More parked KV would not improve the choice, and the prompts' tokens would be missing later, when they could fill
the steps. Prompts that are begun go on.

Before that, steps become smaller. Large steps compute prompts faster than their decodes end, so live KV grows until
prompts must wait; the steps then have few decodes and nothing else. So the maximum of a step falls with live KV, until
prompts come as fast as outputs end.
"""

from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.phase import MemoryLoad, PhasePolicy
from pipemax.domain.plan import Phase, PhaseReason

_LEAST_STEP_TOKENS = 256
"""Steps do not become smaller than this."""
_FIRST_SHARE, _LAST_SHARE = 0.2, 0.55
"""Of the way from one GPU pool of live KV to the watermark: between them steps fall from their maximum to the least.
By simulations over long tables (lab/log.md, 2026-11-25)."""


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
        parked_blocks = max(0.0, min(self._live_blocks, self._high_blocks) - config.gpu_blocks)
        num_bands = max(1, len(self._sizes) - 2)
        self._band_blocks = (_LAST_SHARE - _FIRST_SHARE) * parked_blocks / num_bands
        """Live KV by which a step becomes one size smaller."""
        first_share = _FIRST_SHARE if len(self._sizes) > 2 else _LAST_SHARE
        self._full_until_blocks = config.gpu_blocks + first_share * parked_blocks

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

        Half a band of hysteresis keeps a size for many steps: steps of equal tokens keep all stages busy.
        """
        if self._band_blocks > 0:
            bands = (live_blocks - self._full_until_blocks) / self._band_blocks
            while self._size_index < len(self._sizes) - 1 and bands > self._size_index:
                self._size_index += 1
            while self._size_index > 0 and bands < self._size_index - 1.5:
                self._size_index -= 1
        return self._sizes[self._size_index]

    def admission_demand_blocks(self, phase: Phase, load: MemoryLoad) -> int:
        """Return how many more blocks of input fit, beyond what waits already; negative if more waits than fits.

        At least a refill may wait, also while the host pool is full: steps go on taking prompts as requests end.
        """
        reserved = min(load.reserved_blocks, self._high_blocks - int(self._refill_blocks))
        return self._high_blocks - reserved - load.waiting_blocks


def step_sizes(most_tokens: int) -> tuple[int, ...]:
    """Return the sizes that a mixed step may have, descending: its maximum, and 256·2ⁿ and 768·2ⁿ below it.

    A step's time grows in jumps, one for each tile of a matrix product, which multiples of 256 fill.
    """
    doublings = [_LEAST_STEP_TOKENS << n for n in range(most_tokens.bit_length())]
    smaller = {size for least in doublings for size in (least, 3 * least) if size < most_tokens}
    return (most_tokens, *sorted(smaller, reverse=True))
