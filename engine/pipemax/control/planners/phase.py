"""Chooses between prefill and decode by memory, not by the GPU's load (PipeMax, §3.1.3).

Prefill goes on until the host pool's reservations reach the high watermark, decode until live KV falls below the low
watermark. The paper's low watermark is the GPU's capacity; the default here is 1.5 GPU pools, for the reason given at
``ControllerConfig.gpu_low_watermark``.

Not in the paper: hysteresis of both switches, so that the engine does not alternate rapidly when a pool is smaller than
the work or input trickles in; the early switch once the rest of the input fits; and how much further input the host
pool could take.
"""

from dataclasses import dataclass

from pipemax.control.controller_config import ControllerConfig
from pipemax.domain.plan import Phase, PhaseReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLoad:
    """The inputs of the choice of phase."""

    num_waiting: int
    waiting_blocks: int
    """Blocks that the waiting requests will need at their expected ends."""
    next_fits: bool
    """Whether the first request in line can be admitted now."""
    num_prefilling: int
    """Prompts begun and not complete."""
    num_decodable: int
    live_blocks: int
    reserved_blocks: int
    input_open: bool
    awaited_s: float
    """How long this prefill phase has waited for input with nothing to prefill."""


class PhasePolicy:
    """Chooses the phase; keeps no state of its own."""

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        self._high_blocks = int(config.host_high_watermark * config.host_blocks)
        self._low_blocks = config.gpu_low_watermark * config.gpu_blocks
        self._refill_blocks = config.min_refill_fraction * config.host_blocks

    def admits(self, cost_blocks: int, *, reserved_blocks: int, num_started: int) -> bool:
        """Return whether a reservation stays below the high watermark; a lone request may take the headroom too."""
        return reserved_blocks + cost_blocks <= self._high_blocks or num_started == 0

    def choose(self, phase: Phase, load: MemoryLoad) -> tuple[Phase, PhaseReason]:
        return self._after_prefill(load) if phase is Phase.PREFILL else self._after_decode(load)

    def _after_prefill(self, load: MemoryLoad) -> tuple[Phase, PhaseReason]:
        if load.next_fits:
            return Phase.PREFILL, PhaseReason.FILL_HOST
        if load.num_prefilling:
            return Phase.PREFILL, PhaseReason.FINISH_PROMPTS
        if self._awaits_input(load):
            return Phase.PREFILL, PhaseReason.AWAIT_INPUT
        if load.num_decodable:
            full = load.num_waiting > 0
            return Phase.DECODE, PhaseReason.HOST_FULL if full else PhaseReason.INPUT_USED_UP
        return Phase.PREFILL, PhaseReason.START

    def _awaits_input(self, load: MemoryLoad) -> bool:
        return (
            load.input_open
            and load.num_waiting == 0
            and load.reserved_blocks < self._high_blocks
            and load.awaited_s < self._config.input_grace_s
        )

    def _after_decode(self, load: MemoryLoad) -> tuple[Phase, PhaseReason]:
        if load.num_decodable == 0:
            return Phase.PREFILL, PhaseReason.NOTHING_DECODABLE
        if self._rest_fits(load):
            return Phase.PREFILL, PhaseReason.REST_FITS
        if load.next_fits and load.live_blocks < self._low_blocks and self._is_worthwhile(load):
            return Phase.PREFILL, PhaseReason.LIVE_KV_LOW
        return Phase.DECODE, PhaseReason.KEEP_DECODING

    def _rest_fits(self, load: MemoryLoad) -> bool:
        """Return whether all remaining input fits, so that its long outputs should start now rather than at the end."""
        room = self._high_blocks - load.reserved_blocks
        return load.next_fits and not load.input_open and load.waiting_blocks <= room

    def _is_worthwhile(self, load: MemoryLoad) -> bool:
        """Return whether there is enough room for a prefill phase, and enough input to fill it."""
        room = self._high_blocks - load.reserved_blocks
        enough_room = room >= self._refill_blocks or load.waiting_blocks <= room
        enough_input = (
            not load.input_open
            or min(room, load.waiting_blocks) >= self._refill_blocks
            or load.live_blocks < self._low_blocks / 2
        )
        return enough_room and enough_input

    def admission_demand_blocks(self, phase: Phase, load: MemoryLoad) -> int:
        """Return how many more blocks of input fit, beyond what waits already; negative if more waits than fits.

        Counted are the blocks up to the high watermark at the end of the current or next prefill phase.
        """
        reserved = load.reserved_blocks
        if phase is not Phase.PREFILL:
            # By the time prefill resumes, live KV will have fallen below the low watermark.
            reserved = min(reserved, int(self._low_blocks))
        return self._high_blocks - reserved - load.waiting_blocks
