"""What the engine bench says of answers that differ, on the demo model."""

import pytest

from lab.bench.near_ties import logit_gaps
from lab.tests.test_peers import REPOSITORY

MODEL = str(REPOSITORY / "examples" / "model")
PROMPTS = {"a": "Package: bash", "b": "Package: vim", "c": "Package: git"}


def test_rows_that_agree_need_no_model() -> None:
    assert logit_gaps("no such model", PROMPTS, {"a": (1, 2)}, {"a": (1, 2)}) == {}


def test_the_gap_is_that_of_the_two_tokens_where_the_answers_first_part() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()
    prompt = AutoTokenizer.from_pretrained(MODEL)(PROMPTS["a"], return_tensors="pt")["input_ids"]
    answer = model.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :].tolist()
    ranked = model(torch.cat([prompt, torch.tensor([answer[:2]])], dim=1)).logits[0, -1].topk(2)
    assert ranked.indices[0] == answer[2]
    gaps = logit_gaps(
        MODEL,
        PROMPTS,
        {"a": tuple(answer), "b": (5, 6), "c": (7,)},
        {"a": (*answer[:2], int(ranked.indices[1]), 9), "b": (5,), "c": (7,)},
    )
    assert gaps == {"a": pytest.approx(float(ranked.values[0] - ranked.values[1])), "b": None}
