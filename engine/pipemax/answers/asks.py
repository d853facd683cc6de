"""Define an ask, which is one request to the engine's core, and the core's reply to it.

A row is one ask, unless it samples, is tried again, or chooses: then it is several (``pipemax.answers.row``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipemax.generation import RequestError, Sampling


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads."""

    token_ids: Sequence[int]
    media: Any = None
    """The row's images as the engine has made them; their places in the tokens are part of it. For an endpoint, which
    makes the tokens itself, the row's request."""

    def followed_by(self, token_ids: Sequence[int]) -> "Prompt":
        return Prompt([*self.token_ids, *token_ids], self.media)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request to the engine's core, for a row with its own sampling."""

    ask_id: str
    prompt: Prompt
    sampling: Sampling
    """The row's; the ask's own seed takes the place of its seed."""
    seed: int | None = None
    allowed: tuple[int, ...] = ()
    """If not empty, the answer is one token of these."""
    with_scores: bool = False
    """Whether the reply says how probable each of ``allowed`` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The core's reply to an ask."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """``stop``, ``length``, ``repetition`` or ``abort``."""
    logprobs: Sequence[float] | None = None
    """The logarithm of each token's probability, if the row wants it."""
    pieces: Sequence[str] | None = None
    """The text of each of these tokens."""
    scores: Mapping[int, float] | None = None
    """The same of each allowed token, before the others were ruled out."""
    pooled: NDArray[np.float32] | None = None
    """The output of a pooling model: an embedding, or the classes' probabilities."""
    error: RequestError | None = None
    # Of a server, which says what it counted instead of the tokens.
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reasoning: str | None = None
    """The thinking, which is no part of ``text``."""
    reasoning_tokens: int = 0
    chances: Mapping[str, float] | None = None
    """The probability of each choice, as far as the server tells them apart."""

    @property
    def num_tokens(self) -> int:
        """The tokens of the output, thinking included."""
        return len(self.token_ids) if self.output_tokens is None else self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An output, split into thinking and answer."""

    reasoning: str | None
    answer: str | None
    """None if the output ended before an answer began."""
    answer_tokens: int
    """The output's last tokens, which the answer took."""
