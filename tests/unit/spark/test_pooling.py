"""What a pooling task changes on Spark's side: the task in both configs, the annotation, pairs of texts."""

import pyarrow as pa
import pytest

from pipemax.wire import COMPLETION_SCHEMA, GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.task import Annotator, TaskPlan, annotation_type
from pipemax_spark.functions.udf import OrderedRows
from pipemax_spark.request.generation import check_pooling, with_task
from pipemax_spark.request.prompts import PromptSource


def test_job_and_engine_config_get_the_same_task() -> None:
    engine, generation = with_task({"model": "m"}, GenerationSpec(task="embed"))
    assert (engine, generation.task) == ({"model": "m", "task": "embed"}, "embed")
    engine, generation = with_task({"model": "m", "task": "score"}, GenerationSpec())
    assert (engine["task"], generation.task) == ("score", "score")
    engine, generation = with_task({"model": "m", "reasoning_parser": "qwen3"}, GenerationSpec())
    assert ("task" in engine, generation.include_reasoning) == (False, True)
    with pytest.raises(JobError, match="the task is embed, and the engine config's is score; name one task"):
        with_task({"model": "m", "task": "score"}, GenerationSpec(task="embed"))


def test_questions_are_for_generation() -> None:
    with pytest.raises(JobError, match="ask is for generation, and the task is classify; leave it out"):
        check_pooling(GenerationSpec(task="classify"), PromptSource(prompt_column="a"), ask={"x": "y"})


@pytest.mark.parametrize(
    ("task", "own"),
    [("embed", ["embedding"]), ("classify", ["label", "probabilities", "probability"]), ("score", ["score"])],
)
def test_an_annotation_has_the_tasks_fields_instead_of_a_text(task: str, own: list[str]) -> None:
    names = [field.name for field in annotation_type(GenerationSpec(task=task))]
    assert names == [*own, "prompt_tokens", "error", "spec_hash", "run_id", "completed_at"]


def test_embeddings_pass_through_as_arrays_of_floats() -> None:
    generation = GenerationSpec(task="embed")
    plan = TaskPlan(
        options=EngineOptions(engine={}, generation=generation, job_id="j"),
        spec_hash="s",
        run_id="r",
        output_column="annotation",
    )
    rows = [
        {"row_id": 0, "embedding": [0.5, 0.25], "prompt_tokens": 3, "completed_at": 0},
        {"row_id": 1, "error_code": "engine_error", "error_message": "m", "completed_at": 0},
    ]
    annotations = Annotator(plan).annotations(pa.RecordBatch.from_pylist(rows, schema=COMPLETION_SCHEMA))
    assert annotations.type.field("embedding").type == pa.list_(pa.float32())
    assert [row["embedding"] for row in annotations.to_pylist()] == [[0.5, 0.25], None]


def test_pairs_of_columns_become_a_query_and_a_document() -> None:
    queries, documents = pa.array(["q0", None, "q2"]), pa.array(["d0", "d1", "d2"], pa.large_string())
    (batch,) = OrderedRows(iter([(queries, documents)]), takes_pairs=True).requests()
    rows = batch.column("messages").to_pylist()
    assert [row and [(turn["role"], turn["content"]) for turn in row] for row in rows] == [
        [("query", "q0"), ("document", "d0")],
        None,
        [("query", "q2"), ("document", "d2")],
    ]
    for wrong in (queries, (queries,), (queries, documents, documents), (queries, pa.array([1, 2, 3]))):
        with pytest.raises(JobError, match="two columns of text: a query and a document"):
            next(OrderedRows(iter([wrong]), takes_pairs=True).requests())
