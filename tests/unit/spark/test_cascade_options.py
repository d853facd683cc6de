"""What a cascade compares, as a job's options say it, and what it refuses by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.cascade.equality import Answers
from pipemax_spark.errors import JobError
from pipemax_spark.job.cascade_options import answers_of, promise_of, small_options
from pipemax_spark.options import JobOptions
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.questions import read_questions

SCHEMA = {"type": "object", "properties": {"price": {"type": "number"}, "note": {"type": "string"}}}
OPTIONS = JobOptions(
    input="in",
    output="out",
    source=PromptSource(template="{text}"),
    engine={"model": "large"},
    cascade={"model": "small"},
    generation=GenerationSpec(choice=("a", "b")),
    log_dir=Path("logs"),
)


def asking(**questions: Any) -> dict[str, Any]:
    plain = GenerationSpec()
    asked = {name: {"template": f"{name}?", **settings} for name, settings in questions.items()}
    return {"ask": read_questions(asked, plain), "generation": plain}


def test_each_question_is_compared_in_its_own_way() -> None:
    options = replace(
        OPTIONS,
        **asking(kind={"choice": ["a", "b"]}, deal={"response_format": SCHEMA}),
        agree_fields=("deal.price",),
        agree_tolerance="0.1",
    )
    kind, deal = answers_of(options)
    assert (kind.column, kind.equality.answers, kind.equality.tolerance) == ("kind", Answers.TEXT, "0")
    assert (deal.column, deal.equality.answers, deal.equality.fields) == ("deal", Answers.JSON, ("price",))
    assert not deal.equality.differ('{"price": 1, "note": "x"}', '{"price": 1.1, "note": "y"}')


def test_the_promises_of_all_questions_hold_together() -> None:
    options = replace(OPTIONS, **asking(a={"regex": "x"}, b={"regex": "y"}))
    assert promise_of(OPTIONS).confidence == 0.95
    assert promise_of(options).confidence == 0.975


def test_the_small_model_says_how_sure_it_was_of_each_question() -> None:
    options = small_options(replace(OPTIONS, **asking(a={"regex": "x"}, b={"choice": ["a", "b"]})))
    assert options.engine["model"] == "small"
    assert all(question.generation.logprobs for question in options.ask)
    pooling = small_options(replace(OPTIONS, generation=GenerationSpec(task="classify")))
    assert not pooling.generation.logprobs


def test_a_small_model_that_does_not_think_is_not_asked_for_thoughts() -> None:
    thinking = GenerationSpec(
        choice=("a", "b"), include_reasoning=True, thinking_tokens=50, reasoning_effort="low"
    )
    options = replace(OPTIONS, generation=thinking)
    plain = small_options(options).generation
    assert (plain.include_reasoning, plain.thinking_tokens, plain.reasoning_effort) == (None, None, None)
    both = small_options(replace(options, cascade={"model": "small", "reasoning_parser": "qwen3"})).generation
    assert (both.include_reasoning, both.thinking_tokens, both.reasoning_effort) == (True, 50, "low")
    only_small = replace(OPTIONS, cascade={"model": "small", "reasoning_parser": "qwen3"})
    assert small_options(only_small).generation.include_reasoning


def test_scores_are_compared_within_a_tolerance() -> None:
    source = PromptSource(template="{text}", query_column="query")
    options = replace(OPTIONS, source=source, generation=GenerationSpec(task="score"), agree_tolerance="0.05")
    (answer,) = answers_of(options)
    assert not answer.equality.differ("0.51", "0.55")
    assert answer.equality.differ("0.51", "0.57")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (asking(kind={"choice": ["a", "b"]}, note={}), "the question 'note': .*free text"),
        (asking(a={"choice": ["a", "b"]}) | {"agree_tolerance": "0.1"}, "agree-tolerance is for numbers"),
        (asking(deal={"response_format": SCHEMA}) | {"agree_fields": ("price",)}, "write question.field"),
        (asking(deal={"response_format": SCHEMA}) | {"agree_fields": ("deal.cost",)}, "names 'cost'"),
        ({"generation": GenerationSpec(task="embed")}, "--task embed"),
        ({"incremental": True, "cascade_sample": 0.1}, "--incremental and --cascade-sample"),
        (
            {
                "generation": GenerationSpec(task="score"),
                "source": PromptSource(template="{t}", query_column="q"),
            },
            "give --agree-tolerance",
        ),
        ({"generation": GenerationSpec(choice=("a", "b"), temperature=1.0)}, "--temperature without --seed"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        answers_of(replace(OPTIONS, **changes))
