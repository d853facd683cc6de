"""How many tokens a step would give with n-gram speculation (prompt lookup), counted on rows that are finished.

For greedy rows nothing is guessed: the draft after each token follows from the row's tokens, and it is accepted as far
as it equals the tokens that came. The draft is the one that vLLM's n-gram proposer makes: what stood behind the first
occurrence of the longest of the last ``max_ngram`` to ``min_ngram`` tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Decode steps and their tokens."""

    steps: int = 0
    tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        """At least 1; without steps 1."""
        return self.tokens / self.steps if self.steps else 1.0

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(self.steps + other.steps, self.tokens + other.tokens)


def count_acceptance(
    rows: Iterable[tuple[Sequence[int], Sequence[int]]], *, draft_tokens: int, min_ngram: int, max_ngram: int
) -> Acceptance:
    """Return the decode steps that rows of (prompt tokens, output tokens) would have taken.

    A row's first output token comes with its prompt, and is not counted. Raise ``ValueError`` for lengths below 1.
    """
    if not 1 <= min_ngram <= max_ngram or draft_tokens < 1:
        raise ValueError(
            f"n-grams of {min_ngram} to {max_ngram} and drafts of {draft_tokens} tokens: need at least 1 of each"
        )
    total = Acceptance()
    for prompt, output in rows:
        total += _of_row(prompt, output, draft_tokens, range(max_ngram, min_ngram - 1, -1))
    return total


def speculation_gain(
    accepted: Acceptance, *, rows: int, draft_tokens: int, step_s: Callable[[int], float]
) -> float:
    """Return by what factor decoding becomes faster: tokens of a step over the factor by which it takes longer.

    ``step_s`` gives the seconds of a step of so many tokens; each of the ``rows`` that decode has its last token and
    the draft in it.
    """
    return accepted.tokens_per_step * step_s(rows) / step_s(rows * (draft_tokens + 1))


def _of_row(prompt: Sequence[int], output: Sequence[int], draft_tokens: int, lengths: range) -> Acceptance:
    if len(output) < 2:
        return Acceptance()
    tokens = [*prompt, *output]
    ends: dict[tuple[int, ...], int] = {}
    indexed, known, steps = 0, len(prompt) + 1, 0
    while known < len(tokens):
        # Only n-grams that end before the last known token: the last ones are what is looked for.
        for end in range(indexed + 1, known):
            for length in lengths:
                if length <= end:
                    ends.setdefault(tuple(tokens[end - length : end]), end)
        indexed = known - 1
        begin = _first_end(tokens, known, ends, lengths)
        accepted = 0
        if begin is not None:
            draft = tokens[begin : min(begin + draft_tokens, known)]
            following = tokens[known : known + len(draft)]
            accepted = next(
                (at for at, (one, two) in enumerate(zip(draft, following, strict=False)) if one != two),
                min(len(draft), len(following)),
            )
        known = min(known + accepted + 1, len(tokens))
        steps += 1
    return Acceptance(steps, len(output) - 1)


def _first_end(
    tokens: Sequence[int], known: int, ends: dict[tuple[int, ...], int], lengths: range
) -> int | None:
    """Return where the first occurrence ends of the longest last n-gram that stood before."""
    for length in lengths:
        if length < known and (end := ends.get(tuple(tokens[known - length : known]))) is not None:
            return end
    return None
