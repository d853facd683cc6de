"""Record what is fixed before any label is seen: the rows, the promise, and the seed of the coins."""

import json
import re
from dataclasses import dataclass, replace
from typing import Self

from pipemax_spark.cascade.coins import coin, tie_break
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.cascade.records import canonical_json, read_fields

_SEED = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One draw of coins over rows that were fixed together.

    It is to be recorded, if no other one is there, before the large model answers any row, and never drawn again: who
    draws until the result pleases has no promise.
    """

    seed: str
    """32 hexadecimal digits."""
    rows: int
    agree: float
    confidence: float
    sample_share: float
    """The probability that a row outside of the pilot is sampled."""
    spec_hash: str
    """Of both models, the prompt, the promise, the equality and the score."""
    manifest_digest: str
    """Of the rows."""
    pilot_share: float = 0.0
    """The probability that a row is in the pilot, whose rows both models answer before the sample share is chosen."""
    number: int = 1
    """How many draws the table has had with this one: a reset is counted."""

    def __post_init__(self) -> None:
        if not _SEED.fullmatch(self.seed):
            raise ValueError(f"the seed of a draw is {self.seed!r}; it must have 32 hexadecimal digits")
        if self.rows < 1:
            raise ValueError(f"a draw is over {self.rows} rows; it needs one at least")
        if not 0 < self.sample_share < 1:
            raise ValueError(f"sample_share is {self.sample_share}; give a share above 0 and below 1")
        if not 0 <= self.pilot_share < 1:
            raise ValueError(f"pilot_share is {self.pilot_share}; give a share from 0 to below 1")
        if self.number < 1:
            raise ValueError(f"the number of a draw is {self.number}; the first one is 1")
        Promise(agree=self.agree, confidence=self.confidence)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a draw. Raise ``ValueError`` if the text is none."""
        return cls(**read_fields(cls, json.loads(text)))

    def to_json(self) -> str:
        """Return the draw as one line of JSON, the same bytes for equal draws."""
        return canonical_json(self)

    @property
    def promise(self) -> Promise:
        return Promise(agree=self.agree, confidence=self.confidence)

    @property
    def sampled_below(self) -> float:
        """A row is sampled if its coin is at least ``pilot_share`` and less than this."""
        return self.pilot_share + (1 - self.pilot_share) * self.sample_share

    def after_pilot(self, sample_share: float) -> Self:
        """Return the draw with the sample share that the pilot's rows recommend; the coins stay as they are."""
        if self.pilot_share == 0:
            raise ValueError("a draw without a pilot keeps its sample share: its labels would choose it")
        return replace(self, sample_share=sample_share)

    def coin(self, identity: str, occurrence: int) -> float:
        return coin(self.seed, identity, occurrence)

    def tie_break(self, request: str) -> float:
        return tie_break(self.seed, request)

    def is_pilot(self, row_coin: float) -> bool:
        return row_coin < self.pilot_share

    def is_sampled(self, row_coin: float) -> bool:
        return self.pilot_share <= row_coin < self.sampled_below
