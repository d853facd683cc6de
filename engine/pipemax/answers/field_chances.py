"""Tell how probable each field of a JSON answer was, from the log-probabilities of the answer's tokens. Pure.

A field is a property of the outermost object. Its probability is the product of those of the tokens that write its
value and what ends it. Tokens that the schema forces have the probability 1.
"""

import json
import math
from collections.abc import Sequence

_SPACE = " \t\n\r"


def field_probabilities(
    text: str, pieces: Sequence[str], logprobs: Sequence[float]
) -> tuple[tuple[str, float], ...] | None:
    """Return each field of a JSON object with its probability.

    ``pieces`` are the tokens' texts, each with its log-probability. None if the answer is no object, or if the pieces
    do not write it.
    """
    try:
        values = _values(text)
    except (ValueError, IndexError, RecursionError):
        return None
    places = _places(text, pieces)
    if places is None:
        return None
    return tuple(
        (
            name,
            math.exp(
                sum(
                    logprob
                    for (start, end), logprob in zip(places, logprobs, strict=True)
                    if start < last and end > first
                )
            ),
        )
        for name, (first, last) in values.items()
    )


def _values(text: str) -> dict[str, tuple[int, int]]:
    """Return where each property's value begins in a JSON object, and where what ends it does."""
    read = json.JSONDecoder().raw_decode
    at = _behind_space(text, 0)
    if text[at] != "{":
        raise ValueError("the text is no JSON object")
    values = {}
    at = _behind_space(text, at + 1)
    while text[at] != "}":
        name, at = read(text, at)
        first = _behind_space(text, _behind_space(text, at) + 1)  # behind the colon
        _, end = read(text, first)
        at = _behind_space(text, end)
        # The token behind a number decides that the number ends.
        values[str(name)] = first, at + 1
        if text[at] == ",":
            at = _behind_space(text, at + 1)
    return values


def _behind_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _places(text: str, pieces: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return where each piece stands in the text; None if a piece is not what comes next.

    Some tokenizers leave out the space of a token that is decoded by itself. Behind the text there may be other pieces,
    such as the token that ends the output.
    """
    places, at, length = [], 0, len(text.rstrip())
    for piece in pieces:
        start, word = at, piece.strip()
        if at < length and word:
            while text[at].isspace():
                at += 1
            if not text.startswith(word, at):
                return None
            at += len(word)
        places.append((start, at))
    return places if at >= length else None
