"""Define the interface of an engine that turns requests into completions; ``pipemax.vllm_ext`` implements it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipemax.domain.step_records import StepLimits, StepRecords, TuningFacts
from pipemax.generation import Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one instant."""

    phase: str = "idle"
    """``idle`` | ``prefill`` | ``decode`` | ``mixed``."""
    running_requests: int = 0
    waiting_requests: int = 0
    kv_usage: float = 0.0
    """Share of the GPU's KV blocks in use, 0 to 1."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further figures by name."""
    policy: dict[str, Any] = field(default_factory=dict)
    """The ``PolicyChoice`` under which the engine runs, as plain values."""
    replicas: tuple[dict[str, Any], ...] = ()
    """The figures of each replica by name, if there are several: those above are then of all together."""


class Engine(Protocol):
    """The engine that the server drives. Thread-safe, except that ``poll`` has one caller."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. A bad request raises nothing: ``poll`` returns it with an error."""

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return the requests that have ended since the last call; wait up to ``timeout_s`` for the first.

        Raise ``EngineDiedError`` once the engine is gone; every request in flight is then lost.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests. Unknown ids are ignored.

        ``poll`` does not return them unless they had ended already, or an endpoint was asked for them: then with
        ``spent`` and an error.
        """

    def set_input_open(self, is_open: bool) -> None:
        """Say whether more requests may come soon; at first none are expected.

        While more are expected, a prefill phase that has room left waits a moment for them.
        """

    def admission_credit_tokens(self) -> int:
        """Return how many more tokens (prompt and expected output) the engine can take.

        The count is the room beyond its present requests by the end of its next prefill phase; it is negative if more
        tokens wait than will fit.
        """

    def most_limits(self) -> list[StepLimits]:
        """Return the limits that each replica was started for, which none may exceed.

        An engine without replicas counts as one. Empty for an engine whose limits are fixed, as those of PipeMax and
        of pooling tasks are.
        """

    def limits(self) -> list[StepLimits]:
        """Return the present limits of each replica: those of ``set_limits``, at first vLLM's default or the user's."""

    def set_limits(self, limits: Sequence[StepLimits]) -> None:
        """Have each replica schedule by its entry from one of its next steps on, and after it was started again.

        ``ValueError`` for another number of entries than ``most_limits`` has, or one above its own there. Steps have
        room for what some row must compute at once, such as a whole prompt where prompts are not split, whatever
        their limit is. With more running rows than tokens in a step, some rows wait.
        """

    def take_step_records(self) -> list[StepRecords]:
        """Return the steps of each replica since the last call, an entry for each entry of ``most_limits``.

        Call this about once a second: a call also asks for the steps that the next one returns.
        """

    def speculate(self, replicas: Collection[int]) -> None:
        """Have these replicas, by number, run with n-gram speculation, and the others without.

        Those that change are started again, one after the other, while the others answer their rows. A replica that
        does not start with it, or dies, comes back without. Rows that speculation may change
        (``Sampling.can_speculate``) never run on one that speculates, and once one has come, none does.
        ``ValueError`` for an engine without replicas, and for a number that no replica has.
        """

    def tuning_facts(self) -> TuningFacts | None:
        """Return what a tuner must know, each replica being alike; None for an engine whose limits are fixed."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Stop the engine and wait for its processes to end. Safe to call twice."""
