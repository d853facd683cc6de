"""How the fake engine answers a row that samples, is tried again, chooses or thinks: by the real engine's own row.

A letter is a token of a choice. The model prefers a choice by the prompt, and thinks where the engine config names a
reasoning parser, whatever its name.
"""

import hashlib
from collections.abc import Sequence
from math import log

from pipemax.answers.asks import Ask, Prompt, Reply, Split
from pipemax.answers.choice_tree import ChoiceTree
from pipemax.answers.row import Row, RowTools
from pipemax.generation import Completion, GenerationRequest, Sampling

END_OF_THINKING = "</think>"
_END_TOKEN = 0


class FakeThinking:
    def is_over(self, prompt: Sequence[int], sampling: Sampling) -> bool:
        return '"enable_thinking": false' in (sampling.chat_template_kwargs or "")

    def split(self, prompt: Sequence[int], reply: Reply, sampling: Sampling) -> Split:
        if self.is_over(prompt, sampling):
            return Split(reasoning=None, answer=reply.text, answer_tokens=len(reply.token_ids))
        thought, mark, answer = reply.text.partition(END_OF_THINKING)
        answer = answer.strip()
        return Split(
            reasoning=thought.strip(), answer=answer if mark else None, answer_tokens=len(answer.split())
        )


def answered(request: GenerationRequest, text: str, *, prompt_tokens: int, thinks: bool) -> Completion:
    """Return the row's completion. ``text`` is its answer."""
    thinking = FakeThinking() if thinks else None
    tools = RowTools(
        encode=lambda shown: Prompt(
            [1] * len(" ".join(text for m in shown.messages or () for text in m.texts).split())
        ),
        tree_of=lambda choices: ChoiceTree.of(choices, lambda choice: list(map(ord, choice)), [_END_TOKEN]),
        thinking=thinking,
    )
    row = Row(request, Prompt([1] * prompt_tokens), tools)
    waiting = row.begin()
    while waiting:
        ask = waiting.pop(0)
        reply = _chosen(ask, text) if ask.allowed else _written(ask, text, thinking)
        waiting += row.take(ask.ask_id, reply)
    assert row.completion is not None
    return row.completion


def _written(ask: Ask, text: str, thinking: FakeThinking | None) -> Reply:
    sampling = ask.sampling
    if sampling.choice:
        text = sampling.choice[_number(text, ask.seed) % len(sampling.choice)]
    if sampling.n > 1 and not sampling.is_constrained:
        text = f"{text} {_number(text, ask.seed) % 3}"
    if thinking is not None and not thinking.is_over(ask.prompt.token_ids, sampling):
        thought = f"thinking about {text}".split(" ")[: sampling.thinking_tokens]
        text = f"{' '.join(thought)} {END_OF_THINKING} {text}"
    words = text.split(" ")
    reason, most = "length", sampling.max_tokens
    if sampling.stop_repetition and (end := _end_of_repetition(words[:most], sampling.stop_repetition)):
        reason, most = "repetition", end
    is_cut = len(words) > most
    text = " ".join(words[:most]) if is_cut else text
    tokens = tuple(range(len(text.split())))
    return Reply(
        text=text,
        token_ids=tokens,
        finish_reason=reason if is_cut else "stop",
        logprobs=[-0.5] * len(tokens) if sampling.logprobs else None,
        pieces=text.split(),
    )


def _end_of_repetition(words: Sequence[str], times: int) -> int | None:
    """Return how many words there are when one has come so many times in a row."""
    ends = (end for end in range(times, len(words) + 1) if len({*words[end - times : end]}) == 1)
    return next(ends, None)


def _chosen(ask: Ask, text: str) -> Reply:
    token = ask.allowed[_number(text, ask.seed) % len(ask.allowed)]
    scores = {each: log(0.5 if each == token else 0.5 / len(ask.allowed)) for each in ask.allowed}
    return Reply(token_ids=(token,), finish_reason="length", scores=scores if ask.with_scores else None)


def _number(text: str, seed: int | None) -> int:
    return int.from_bytes(hashlib.blake2b(f"{text} {seed}".encode(), digest_size=4).digest())
