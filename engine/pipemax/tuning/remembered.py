"""Keep the result of a tuning for the next table of the same kind: one YAML file for a model and an engine.

The caller names the file, after the model and everything that step times depend on. It is a cache: a file that cannot
be read is ignored with a warning, and deleting it costs a tuning.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from pipemax.domain.step_records import StepLimits
from pipemax.tuning.canary import Speculation
from pipemax.tuning.race import Estimate
from pipemax.tuning.step_fit import WorkCosts
from pipemax.tuning.table import Lengths
from pipemax.tuning.tuned import Tuned

log = logging.getLogger(__name__)

TUNINGS = "tunings"
"""The directory's name among the kept files."""
_MAX_OCTAVES = 1.0
"""Two kinds are near if none of their lengths differs by more than a factor of 2."""
_MAX_SHARE = 0.25
"""…and their shared shares by no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKind:
    """What limits depend on, of a table."""

    mean_prompt: float
    mean_output: float
    prompt_spread: float
    """Standard deviation of the prompts, in tokens."""
    shared_share: float
    """Share of the prompt tokens that the prefix cache had."""
    is_constrained: bool = False
    """Answers follow a schema or a grammar."""
    has_lora: bool = False
    has_images: bool = False

    def octaves_from(self, other: Self) -> float | None:
        """Return the largest difference of the lengths, as a logarithm to the base 2; ``None``: not comparable."""
        traits = ("is_constrained", "has_lora", "has_images")
        if any(getattr(self, name) != getattr(other, name) for name in traits):
            return None
        if abs(self.shared_share - other.shared_share) > _MAX_SHARE:
            return None
        pairs = [
            (self.mean_prompt, other.mean_prompt),
            (self.mean_output, other.mean_output),
            (self.prompt_spread + 1, other.prompt_spread + 1),
        ]
        return max(abs(math.log2(max(one, 1.0) / max(two, 1.0))) for one, two in pairs)

    def is_same_as(self, other: Self) -> bool:
        """Tell whether an entry of the one replaces that of the other: lengths differ by half an octave at most."""
        octaves = self.octaves_from(other)
        return octaves is not None and octaves <= 0.5


def kind_of(lengths: Lengths, **traits: bool) -> TableKind:
    """Return the kind of a table of such rows, of which there must be some; ``traits`` as in ``TableKind``."""
    return TableKind(
        mean_prompt=lengths.mean_prompt,
        mean_output=lengths.mean_output,
        prompt_spread=float(np.std(lengths.prompt_tokens)),
        shared_share=lengths.mean_found / max(1.0, lengths.mean_prompt),
        **traits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kept result."""

    kind: TableKind
    limits: StepLimits
    costs: WorkCosts
    gain: Estimate | None
    """As ``Tuned.gain``."""
    pairs: int
    date: str
    speculation: Speculation | None = None
    """What a trial of n-gram speculation came to; None without one."""

    @classmethod
    def of(cls, tuned: Tuned, kind: TableKind, costs: WorkCosts, *, date: str) -> Self:
        return cls(
            kind=kind,
            limits=tuned.limits,
            costs=costs,
            gain=tuned.gain,
            pairs=tuned.pairs,
            date=date,
        )


def load_entries(path: Path) -> Sequence[Entry]:
    """Return what the file holds; nothing, with a warning, of a file that cannot be read."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, list):
            raise TypeError(f"expected a list, got a {type(values).__name__}")
        return [_entry(value) for value in values]
    except FileNotFoundError:
        return []
    except (AttributeError, KeyError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        log.warning("the remembered tunings in %s cannot be read, and are tuned again: %s", path, reason)
        return []


def nearest_entry(entries: Sequence[Entry], kind: TableKind) -> Entry | None:
    """Return the entry of the nearest kind of table, ``None`` if none is within a factor of 2."""
    near = [
        (octaves, index)
        for index, entry in enumerate(entries)
        if (octaves := kind.octaves_from(entry.kind)) is not None and octaves <= _MAX_OCTAVES
    ]
    return entries[min(near)[1]] if near else None


def keep_entry(path: Path, entry: Entry) -> None:
    """Add an entry to the file, in place of one of the same kind. A file that cannot be written costs a warning."""
    others = [other for other in load_entries(path) if not entry.kind.is_same_as(other.kind)]
    values = [asdict(one) for one in [*others, entry]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        draft.replace(path)  # whole: two engines may end a tuning at once
    except OSError as error:
        log.warning("the tuning cannot be kept in %s, so the next table is tuned again: %s", path, error)


def _entry(values: dict[str, Any]) -> Entry:
    gain, tried = _estimate(values["gain"]), values.get("speculation")
    entry = Entry(
        **{
            **values,
            "kind": TableKind(**values["kind"]),
            "limits": StepLimits(**values["limits"]),
            "costs": WorkCosts(**values["costs"]),
            "gain": gain,
            "speculation": tried and Speculation(**{**tried, "gain": _estimate(tried["gain"])}),
        }
    )
    if min(entry.costs.prompt_token_s, entry.costs.decode_s, entry.kind.mean_prompt) <= 0:
        raise ValueError(f"an entry has costs or lengths that are not positive: {entry}")
    return entry


def _estimate(values: dict[str, float] | None) -> Estimate | None:
    return None if values is None else Estimate(**values)
