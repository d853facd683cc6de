"""The limits of an engine's steps, which may change while it runs, and a record of the steps that it has made.

Neither knows of an engine: stock vLLM's scheduler makes the records (``vllm_ext.scheduler.tunable``), a tuner reads
them and chooses the limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
MOST_STEPS = 8192
"""Steps whose records are kept until somebody takes them: minutes of an engine whose steps take 20 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What one step of an engine may contain at most."""

    step_tokens: int
    """Tokens of one step, of prompts and of decoding rows together."""
    running_rows: int
    """Rows that run at the same time. With fewer than run at present, the others go on until they end."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise ValueError(f"{limit.name} is {getattr(self, limit.name)}, must be at least 1")

    def within(self, ceiling: "StepLimits") -> "StepLimits":
        """Return these limits, none of them above ``ceiling``."""
        return StepLimits(
            step_tokens=min(self.step_tokens, ceiling.step_tokens),
            running_rows=min(self.running_rows, ceiling.running_rows),
        )


def check_limits(limits: Sequence[StepLimits], ceilings: Sequence[StepLimits]) -> None:
    """Raise ``ValueError`` unless there are limits for each replica, none above the ``ceilings`` it was started for.

    ``ceilings`` are empty for an engine whose limits are fixed.
    """
    if not ceilings:
        raise ValueError("the limits of this engine's steps are those of its start; they cannot change")
    if len(limits) != len(ceilings):
        raise ValueError(f"{len(limits)} limits were given, and the engine has {len(ceilings)} replicas")
    for number, (wanted, ceiling) in enumerate(zip(limits, ceilings, strict=True), 1):
        if wanted.within(ceiling) != wanted:
            raise ValueError(f"replica {number}: {wanted} is above what it was started for, {ceiling}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFacts:
    """What a tuner must know of an engine, beside its limits."""

    kv_blocks: int
    """Blocks of its KV cache, of one replica."""
    block_tokens: int
    kept_in: str
    """The file that keeps the tunings of engines like it: this model, GPU, layout and version of vLLM."""
    can_speculate: bool = False
    """Whether it can be started again with n-gram speculation, and greedy rows keep their tokens then."""


def _no_counts() -> Counts:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecords:
    """Successive steps of an engine that computed anything, oldest first: arrays of shape (steps,)."""

    prompt_tokens: Counts
    """Tokens of prompts that the step computed, those that a preempted row computed again included."""
    decodes: Counts
    """Rows for which it computed their next output token."""
    kv_tokens: Counts
    """Tokens whose KV these rows read, their own new one included."""
    running: Counts
    """Rows that ran when its output came."""
    waiting: Counts
    """Rows that waited then, preempted ones included."""
    preempted: Counts
    """Rows that were preempted for it."""
    seconds: Seconds
    """Since the output of the step before; NaN if the engine had nothing to do in between, and for its first step."""
    outputs_so_far: Counts = field(default_factory=_no_counts)
    """Output tokens of each row that ran when the records were taken, shape (rows,); may be left out."""
    dropped: int = 0
    """Steps before these of which there is no record, because nobody took it in time."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in _ARRAYS}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the arrays of step records are not of equal length: {lengths}")

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.seconds)

    @classmethod
    def none(cls) -> Self:
        """Return the records of no step."""
        return cls.from_plain({})

    @classmethod
    def joined(cls, parts: Sequence["StepRecords"], *, newest: int | None = None) -> Self:
        """Return successive records as one, of the ``newest`` steps if it is given."""
        if not parts:
            return cls.none()
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        count = len(arrays["seconds"])
        excess = 0 if newest is None else max(0, count - newest)
        dropped = sum(part.dropped for part in parts) + excess
        outputs = next((part.outputs_so_far for part in reversed(parts) if len(part)), _no_counts())
        steps = {name: array[excess:] for name, array in arrays.items()}
        return cls(**steps, outputs_so_far=outputs, dropped=dropped)

    def since(self, first: int) -> Self:
        """Return the steps from the one with this index on."""
        return type(self)(**{name: getattr(self, name)[first:] for name in _ARRAYS})

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, which ``from_plain`` reads: a list for each array, NaN as None."""
        lists: dict[str, Any] = {name: getattr(self, name).tolist() for name in _ARRAYS}
        lists["seconds"] = [None if second != second else second for second in lists["seconds"]]
        return {**lists, "outputs_so_far": self.outputs_so_far.tolist(), "dropped": self.dropped}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Return the records of these plain values; a missing list is an empty one."""
        counts = {
            name: np.array(values.get(name, []), dtype=np.int64)
            for name in (*_ARRAYS, "outputs_so_far")
            if name != "seconds"
        }
        seconds = np.array(values.get("seconds", []), dtype=np.float64)  # None becomes NaN
        return cls(**counts, seconds=seconds, dropped=values.get("dropped", 0))


_ARRAYS = tuple(
    array.name for array in fields(StepRecords) if array.name not in ("outputs_so_far", "dropped")
)
