"""An engine without rows, for fakes to be made of: its limits, and records that show by which of them it would run."""

from collections.abc import Collection, Sequence

from pipemax.api import Completion, EngineStats
from pipemax.domain.step_records import StepLimits, StepRecords, TuningFacts, check_limits


class IdleEngine:
    """All of ``pipemax.api.Engine`` but ``submit``. Its limits are fixed unless there are ``most``.

    ``tunings`` is the file of its remembered tunings.
    """

    def __init__(self, most: tuple[int, int] | None = None, tunings: str | None = None) -> None:
        self._tunings = tunings
        self._most = [] if most is None else [StepLimits(step_tokens=most[0], running_rows=most[1])]
        self._limits = self._most

    def poll(self, timeout_s: float) -> list[Completion]:
        return []

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def set_input_open(self, is_open: bool) -> None: ...

    def admission_credit_tokens(self) -> int:
        return 0

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None: ...

    def most_limits(self) -> list[StepLimits]:
        return self._most

    def limits(self) -> list[StepLimits]:
        return self._limits

    def set_limits(self, limits: Sequence[StepLimits]) -> None:
        check_limits(limits, self._most)
        self._limits = [*limits]

    def speculate(self, replicas: Collection[int]) -> None:
        raise ValueError("a fake engine has no replicas")

    def tuning_facts(self) -> TuningFacts | None:
        if self._tunings is None:
            return None
        return TuningFacts(kv_blocks=1_000, block_tokens=16, kept_in=self._tunings, can_speculate=True)

    def take_step_records(self) -> list[StepRecords]:
        """Return one step, as full as the limits allow."""
        return [
            StepRecords.from_plain(
                {
                    "prompt_tokens": [limits.step_tokens],
                    "running": [limits.running_rows],
                    **{name: [0] for name in ("decodes", "kv_tokens", "waiting", "preempted")},
                    "seconds": [None],
                }
            )
            for limits in self._limits
        ]
