"""Equal requests of sessions that reuse results: computed once at a time, and how long an answer is given again."""

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from tests.fakes.settings import expected_text, fake_config
from tests.serve.support import at_once, options, run_prompts, server_stats

PROMPTS = [f"prompt {i}" for i in range(20)]


RowsReused = Callable[..., int]


@pytest.fixture
def rows_reused(shared_engine_python: str) -> RowsReused:
    """Asks one server the same questions by different engines."""

    def ask(model: object, *, prompts: Sequence[str | None] = PROMPTS, **engine: Any) -> int:
        config, job = fake_config(model=str(model)) | engine, uuid.uuid4().hex
        opts = options(shared_engine_python, engine=config, job_id=job, reuses_results=True)
        run_prompts(prompts, opts)
        return server_stats(opts).jobs[job].rows_reused

    return ask


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_an_answer_is_reused_while_its_engine_is_there_and_after_others_while_the_model_is_the_same(
    rows_reused: RowsReused, model: Path
) -> None:
    assert rows_reused(model) == 0
    assert rows_reused(model) == len(PROMPTS)
    assert rows_reused("another", prompts=[f"row of {model}"]) == 0
    assert rows_reused(model) == len(PROMPTS)
    (model / "model.safetensors").write_bytes(b"others!")
    rows_reused("another")
    assert rows_reused(model) == 0, "its weights were replaced"


def test_equal_rows_without_an_answer_are_not_counted(rows_reused: RowsReused, model: Path) -> None:
    assert rows_reused(model, prompts=[None] * 5 + ["[[error]]"] * 3 + ["a"] * 2) == 1


@pytest.mark.long  # as of a replaced model
def test_answers_made_with_an_old_tokenizer_are_not_reused(
    rows_reused: RowsReused, model: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    rows_reused(model, tokenizer=str(tokenizer))
    (tokenizer / "tokenizer.json").write_text('{"added_tokens": []}')
    rows_reused("another")
    assert rows_reused(model, tokenizer=str(tokenizer)) == 0


def test_an_answer_of_a_hub_name_that_may_have_moved_on_ends_with_its_engine(rows_reused: RowsReused) -> None:
    rows_reused("org/name")
    assert rows_reused("org/name") == len(PROMPTS)
    rows_reused("another")
    assert rows_reused("org/name") == 0


def test_an_answer_of_a_commit_on_the_hub_outlives_its_engine(rows_reused: RowsReused) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    rows_reused("org/name", revision=commit)
    rows_reused("another")
    assert rows_reused("org/name", revision=commit) == len(PROMPTS)


def test_equal_rows_that_come_at_once_are_computed_once_and_fill_no_window(shared_engine_python: str) -> None:
    """Two sessions with 3,000 rows each and 20 prompts between them, at an engine whose window is 24 rows."""
    opts = options(shared_engine_python, latency_s=0.3, job_id="at once", reuses_results=True)
    prompts = [f"prompt {row % 20}" for row in range(3_000)]
    for rows in at_once(lambda of_session: run_prompts(of_session, opts), [prompts, prompts]):
        assert [row["text"] for row in rows] == [expected_text(prompt) for prompt in prompts]
    stats = server_stats(opts)
    assert stats.engine_metrics["submitted"] == 20
    assert (stats.jobs["at once"].rows_done, stats.jobs["at once"].rows_reused) == (6_000, 5_980)


def test_rows_sampled_without_a_seed_are_all_computed(shared_engine_python: str) -> None:
    generation = GenerationSpec(temperature=0.7)
    opts = options(shared_engine_python, job_id="s", generation=generation, reuses_results=True)
    rows = run_prompts(["the same"] * 8, opts)
    assert Counter(row["text"] for row in rows) == {expected_text("the same"): 8}
    assert server_stats(opts).jobs["s"].rows_reused == 0
