"""Admits prompts to mixed steps by memory: what in the paper switches phases throttles prefill here.

A prompt is begun while the host pool's reservations, with it, stay below the high watermark, and while live KV is
below a watermark of its own. One GPU pool of live KV is on the GPU; the rest is parked, and the prefetch chooses from
it. More parked KV would not improve the choice, and the prompts' tokens would be missing later, when they could fill
the steps. Prompts that are begun go on.
"""

from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.phase import MemoryLoad, PhasePolicy
from pipemax.domain.plan import Phase, PhaseReason


class PromptThrottle(PhasePolicy):
    """Chooses whether mixed steps begin prompts; the phase is always the same."""

    def __init__(self, config: ControllerConfig) -> None:
        super().__init__(config)
        # Where nothing is overwritten, parked requests come back only as others end: the GPU should hold all.
        num_pools = (
            config.mixed_live_watermark if config.overwrites else min(1.0, config.mixed_live_watermark)
        )
        self._live_blocks = num_pools * config.gpu_blocks

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

    def admission_demand_blocks(self, phase: Phase, load: MemoryLoad) -> int:
        """Return how many more blocks of input fit, beyond what waits already; negative if more waits than fits.

        At least a refill may wait, also while the host pool is full: steps go on taking prompts as requests end.
        """
        reserved = min(load.reserved_blocks, self._high_blocks - int(self._refill_blocks))
        return self._high_blocks - reserved - load.waiting_blocks
