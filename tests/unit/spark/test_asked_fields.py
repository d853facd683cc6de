"""The annotation's fields that exist only where a job asks for them: from the engine's completions to the column."""

import pyarrow as pa
import pytest

from pipemax.generation import Completion, RequestError
from pipemax.serve.rows.arrow_rows import FinishedRow, completion_batch
from pipemax.wire import COMPLETION_SCHEMA, ErrorCode, GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.task import Annotator, TaskPlan, annotation_type
from pipemax_spark.request.generation import for_engine
from pipemax_spark.transform import generation_spec

PLAIN = [
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "error",
    "spec_hash",
    "run_id",
    "completed_at",
]


def annotated(generation: GenerationSpec, *completions: Completion) -> list[dict[str, object]]:
    rows = [
        FinishedRow(row_id=number, completion=completion, completed_at_us=1)
        for number, completion in enumerate(completions)
    ]
    batch = completion_batch(rows)
    assert batch.schema == COMPLETION_SCHEMA
    options = EngineOptions(engine={"model": "m"}, generation=generation, job_id="j")
    plan = TaskPlan(options=options, spec_hash="s", run_id="r", output_column="annotation")
    column = Annotator(plan).annotations(batch)
    assert column.type == annotation_type(generation)
    return column.to_pylist()  # type: ignore[no-any-return]


def test_a_job_that_asks_for_nothing_has_the_fields_that_it_always_had() -> None:
    assert annotation_type(GenerationSpec()).names == PLAIN


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({"logprobs": True}, ["logprob_sum", "logprob_mean"]),
        ({"logprobs": True, "choice": ("a", "b")}, ["probabilities", "probability"]),
        (
            {"logprobs": True, "response_format": '{"type": "object"}'},
            ["parsed", "logprob_sum", "logprob_mean", "field_probabilities"],
        ),
        ({"choice": ("a", "b")}, []),
        ({"n": 2, "temperature": 1.0}, ["samples", "agreement"]),
        ({"attempts": 2, "temperature": 1.0}, ["attempts"]),
        ({"include_reasoning": True}, ["reasoning", "reasoning_tokens"]),
        ({"include_reasoning": False}, ["reasoning_tokens"]),
    ],
)
def test_each_feature_adds_its_fields(asked: dict[str, object], fields: list[str]) -> None:
    names = annotation_type(GenerationSpec(**asked)).names  # type: ignore[arg-type]
    assert [name for name in names if name not in PLAIN] == fields


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"choice": ("a",)}, "choice has only 'a'; give at least two choices"),
        ({"choice": ("a", "b", "a")}, "choice has 'a' twice"),
        ({"choice": ("a", " ")}, "choice has ' ', which is empty or blank"),
        ({"choice": ("a", "b"), "regex": "a|b"}, "choice and regex are given"),
        ({"n": 3}, "n is 3 with temperature 0"),
        ({"attempts": 2}, "attempts is 2 with temperature 0"),
        ({"attempts_show_error": True}, "attempts_show_error needs attempts above 1"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs must be a JSON object"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"top_p": float("nan")}, "top_p is nan"),
    ],
)
def test_what_cannot_be_asked_for_is_told(asked: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GenerationSpec(**asked).sampling()  # type: ignore[arg-type]


def test_a_row_keeps_its_probabilities_samples_and_thinking() -> None:
    generation = GenerationSpec(
        choice=("a", "b"), logprobs=True, n=3, temperature=1.0, attempts=2, include_reasoning=True
    )
    good = Completion(
        request_id="0",
        text="a",
        finish_reason="stop",
        completion_tokens=5,
        reasoning="hmm",
        reasoning_tokens=2,
        probabilities=(("a", 0.75), ("b", 0.25)),
        samples=("a", None, "a"),
        agreement=2 / 3,
        attempts=2,
    )
    cut = Completion(
        request_id="1",
        finish_reason="length",
        reasoning="hm",
        reasoning_tokens=1,
        error=RequestError(code=ErrorCode.REASONING_UNFINISHED, message="cut"),
    )
    first, second = annotated(generation, good, cut)
    assert (first["text"], first["reasoning"], first["reasoning_tokens"]) == ("a", "hmm", 2)
    assert first["probabilities"] == [("a", 0.75), ("b", 0.25)]
    assert (first["samples"], first["attempts"]) == (["a", None, "a"], 2)
    assert first["error"] is None
    assert second["error"] == {"code": "reasoning_unfinished", "message": "cut"}
    assert (second["text"], second["reasoning"]) == (None, "hm")


def test_an_invalid_answer_keeps_its_text_next_to_its_error() -> None:
    error = RequestError(code=ErrorCode.RESPONSE_FORMAT, message="the output 'x' is none of the choices")
    (row,) = annotated(
        GenerationSpec(choice=("a", "b")),
        Completion(request_id="0", text="x", finish_reason="stop", error=error),
    )
    assert (row["text"], row["finish_reason"]) == ("x", "stop")
    assert row["error"] == {"code": "response_format", "message": error.message}


def test_thinking_is_included_where_the_engine_splits_it_off_and_the_job_says_nothing() -> None:
    thinks = {"model": "m", "reasoning_parser": "qwen3"}
    assert for_engine(GenerationSpec(), {"model": "m"}).include_reasoning is None
    assert for_engine(GenerationSpec(), thinks).include_reasoning is True
    assert for_engine(GenerationSpec(include_reasoning=False), thinks).include_reasoning is False


def test_python_s_values_become_the_wire_s() -> None:
    spec = generation_spec(choice=["a", "b"], chat_template_kwargs={"enable_thinking": False})
    assert (spec.choice, spec.chat_template_kwargs) == (("a", "b"), '{"enable_thinking": false}')
    with pytest.raises(JobError, match="choice is the text 'ab'; give a list"):
        generation_spec(choice="ab")
    assert pa.types.is_map(COMPLETION_SCHEMA.field("probabilities").type)
