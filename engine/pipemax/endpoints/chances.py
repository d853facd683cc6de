"""Tell how probable each choice was, from the log-probabilities that a server lists beside its tokens. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an output, as its text, with its alternatives and their log-probabilities."""

    text: str
    logprob: float
    alternatives: Mapping[str, float]


def listed_tokens(logprobs: Mapping[str, Any], *, is_chat: bool) -> list[Token]:
    """Return the tokens that a server lists. ``KeyError``, ``TypeError`` or ``ValueError`` if these are none."""
    if is_chat:
        return [
            Token(
                str(one["token"]),
                float(one["logprob"]),
                {str(other["token"]): float(other["logprob"]) for other in one.get("top_logprobs") or ()},
            )
            for one in logprobs["content"]
        ]
    tops = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    return [
        Token(str(text), float(logprob), dict(top or {}))
        for text, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    ]


def chances_of(answer: str, choices: Sequence[str], tokens: Sequence[Token]) -> dict[str, float]:
    """Return the probability of each choice, by the alternatives at the tokens where the choices part.

    At each token only the alternatives count with which the output may become one of the choices. A choice whose
    alternative is not listed has 0. Choices that the tokens do not tell apart are left out: two that part from the
    answer by the same token, and one of which the answer is the beginning.
    """
    if answer not in choices:
        return {}
    output = "".join(token.text for token in tokens)
    texts = _as_written(answer, choices, output)
    chances: dict[str, float] = {}
    unknown: set[str] = set()
    on_path, sure, prefix = set(choices), 1.0, ""
    for token in tokens:
        listed = {**token.alternatives, token.text: token.logprob}
        ways = {
            text: {choice for choice in on_path if texts[choice].startswith(prefix + text)}
            for text in listed
            if text
        }
        staying = ways.get(token.text, set())
        weights = {text: math.exp(listed[text]) for text, way in ways.items() if way or text == token.text}
        total, lost = sum(weights.values()), 0.0
        for text, weight in weights.items():
            leaving = ways[text] - staying
            if not leaving:
                continue
            lost += weight
            if len(leaving) == 1 and ways[text] == leaving:
                (choice,) = leaving
                chances[choice] = chances.get(choice, 0.0) + sure * weight / total
            else:
                unknown |= leaving
        chances |= {choice: 0.0 for choice in on_path - staying if choice not in chances}
        sure *= 1 - lost / total if total > 0 else 1
        on_path, prefix = staying, prefix + token.text
    chances[answer] = sure
    return {choice: chances[choice] for choice in choices if choice in chances and choice not in unknown}


def _as_written(answer: str, choices: Sequence[str], output: str) -> dict[str, str]:
    """Return what the whole output would be for each choice."""
    for write in (_json_text, _json_ascii, str):
        lead, found, tail = output.partition(write(answer))
        if found:
            return {choice: lead + write(choice) + tail for choice in choices}
    return {choice: choice for choice in choices}


def _json_text(choice: str) -> str:
    return json.dumps(choice, ensure_ascii=False)


def _json_ascii(choice: str) -> str:
    return json.dumps(choice)
