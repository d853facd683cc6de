"""The acceptance of n-gram speculation, counted on finished rows, against vLLM's own proposer."""

import random

import numpy as np
import pytest
from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

from pipemax.tuning.prompt_lookup import Acceptance, count_acceptance, speculation_gain


def draft_of_vllm(tokens: list[int], *, draft_tokens: int, min_ngram: int, max_ngram: int) -> list[int]:
    drafts, counts = np.zeros((1, draft_tokens), dtype=np.int32), np.zeros(1, dtype=np.int32)
    ids = np.array([tokens], dtype=np.int32)
    length = np.array([len(tokens)], dtype=np.int32)
    batch_propose_numba([0], length, ids, min_ngram, max_ngram, 10_000, draft_tokens, drafts, counts)
    return [int(token) for token in drafts[0, : counts[0]]]


def steps_with_vllm(prompt: list[int], output: list[int], **lengths: int) -> int:
    """Decode the row step by step with vLLM's drafts."""
    known, steps = 1, 0
    while known < len(output):
        draft = draft_of_vllm(prompt + output[:known], **lengths)
        accepted = 0
        while accepted < len(draft) and output[known + accepted : known + accepted + 1] == [draft[accepted]]:
            accepted += 1
        known, steps = known + accepted + 1, steps + 1
    return steps


@pytest.mark.parametrize("lengths", [(3, 2, 4), (1, 1, 1), (5, 3, 3), (4, 1, 6)])
@pytest.mark.parametrize("alphabet", [2, 5, 30])
def test_the_steps_are_those_of_vllms_drafts(alphabet: int, lengths: tuple[int, int, int]) -> None:
    draw = random.Random(alphabet)
    draft_tokens, min_ngram, max_ngram = lengths
    named = {"draft_tokens": draft_tokens, "min_ngram": min_ngram, "max_ngram": max_ngram}
    for _ in range(10):
        prompt = draw.choices(range(alphabet), k=draw.randint(1, 40))
        copied = prompt[draw.randrange(len(prompt)) :]
        output = (
            draw.choices(range(alphabet), k=draw.randint(1, 20)) + copied + draw.choices(range(alphabet), k=9)
        )
        counted = count_acceptance([(prompt, output)], **named)
        assert counted == Acceptance(steps_with_vllm(prompt, output, **named), len(output) - 1)


def test_a_copied_answer_takes_a_fraction_of_the_steps_and_rows_add_up() -> None:
    prompt = list(range(100))
    copied = count_acceptance([(prompt, prompt[10:60])], draft_tokens=4, min_ngram=1, max_ngram=3)
    assert copied == Acceptance(steps=10, tokens=49)
    other = (prompt, [200, 201, 202])
    both = count_acceptance([(prompt, prompt[10:60]), other], draft_tokens=4, min_ngram=1, max_ngram=3)
    assert both == copied + Acceptance(2, 2)
    assert count_acceptance([(prompt, [])], draft_tokens=4, min_ngram=1, max_ngram=3).tokens_per_step == 1.0


def test_the_gain_is_tokens_a_step_over_the_longer_step() -> None:
    def step_s(tokens: int) -> float:
        return 0.01 + tokens * 1e-4

    gain = speculation_gain(Acceptance(steps=10, tokens=20), rows=50, draft_tokens=3, step_s=step_s)
    assert gain == pytest.approx(2.0 * 0.015 / 0.030)


def test_lengths_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 of each"):
        count_acceptance([], draft_tokens=0, min_ngram=1, max_ngram=1)
