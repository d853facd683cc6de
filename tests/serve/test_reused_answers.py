"""Equal requests of sessions that reuse results: computed once at a time, and how long an answer is given again."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.executor.client import EngineOptions
from tests.fakes.settings import expected_text, fake_config
from tests.serve.support import options, run_prompts, server_stats

MakePython = Callable[..., str]
PROMPTS = [f"prompt {i}" for i in range(20)]


class Asker:
    """Asks one server the same questions by different engines."""

    def __init__(self, engine_python: str) -> None:
        self._engine_python = engine_python
        self._jobs = 0

    def rows_reused(self, model: str, *, prompts: Sequence[str | None] = PROMPTS, **engine: Any) -> int:
        """Of the prompts, asked again by this model."""
        self._jobs += 1
        job = f"job {self._jobs}"
        config = fake_config(model=model) | engine
        opts = options(self._engine_python, engine=config, job_id=job, reuses_results=True)
        run_prompts(prompts, opts)
        return server_stats(opts).jobs[job].rows_reused


@pytest.fixture
def asker(fake_engine_python: MakePython) -> Asker:
    return Asker(fake_engine_python("--replace-grace-s=0"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_a_cached_answer_is_reused_while_its_engine_is_there(asker: Asker, model: Path) -> None:
    assert asker.rows_reused(str(model)) == 0
    assert asker.rows_reused(str(model)) == len(PROMPTS)


def test_equal_rows_without_an_answer_are_not_counted(asker: Asker, model: Path) -> None:
    assert asker.rows_reused(str(model), prompts=[None] * 5 + ["[[error]]"] * 3 + ["a"] * 2) == 1


def test_a_cached_answer_is_reused_after_other_engines_if_the_model_is_the_same(
    asker: Asker, model: Path
) -> None:
    asker.rows_reused(str(model))
    assert asker.rows_reused("another") == 0
    assert asker.rows_reused(str(model)) == len(PROMPTS)


def test_answers_of_a_replaced_model_are_not_reused(asker: Asker, model: Path) -> None:
    asker.rows_reused(str(model))
    (model / "model.safetensors").write_bytes(b"others!")
    asker.rows_reused("another")
    assert asker.rows_reused(str(model)) == 0


@pytest.mark.long  # as of a replaced model
def test_answers_made_with_an_old_tokenizer_are_not_reused(asker: Asker, model: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    asker.rows_reused(str(model), tokenizer=str(tokenizer))
    (tokenizer / "tokenizer.json").write_text('{"added_tokens": []}')
    asker.rows_reused("another")
    assert asker.rows_reused(str(model), tokenizer=str(tokenizer)) == 0


def test_an_answer_of_a_hub_name_that_may_have_moved_on_ends_with_its_engine(asker: Asker) -> None:
    asker.rows_reused("org/name")
    assert asker.rows_reused("org/name") == len(PROMPTS)
    asker.rows_reused("another")
    assert asker.rows_reused("org/name") == 0


def test_an_answer_of_a_commit_on_the_hub_outlives_its_engine(asker: Asker) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    asker.rows_reused("org/name", revision=commit)
    asker.rows_reused("another")
    assert asker.rows_reused("org/name", revision=commit) == len(PROMPTS)


def _run_at_once(sessions: list[list[str]], opts: EngineOptions) -> list[list[dict[str, Any]]]:
    results: dict[int, list[dict[str, Any]]] = {}

    def run(number: int) -> None:
        results[number] = run_prompts(sessions[number], opts)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(sessions))]


def test_equal_rows_that_come_at_once_are_computed_once_and_fill_no_window(
    fake_engine_python: MakePython,
) -> None:
    """Two sessions with 3,000 rows each and 20 prompts between them, at an engine whose window is 24 rows."""
    opts = options(fake_engine_python(), latency_s=0.3, reuses_results=True)
    prompts = [f"prompt {row % 20}" for row in range(3_000)]
    for rows in _run_at_once([prompts, prompts], opts):
        assert [row["text"] for row in rows] == [expected_text(prompt) for prompt in prompts]
    stats = server_stats(opts)
    assert stats.engine_metrics["submitted"] == 20
    assert (stats.jobs["job"].rows_done, stats.jobs["job"].rows_reused) == (6_000, 5_980)


def test_rows_sampled_without_a_seed_are_all_computed(shared_engine_python: str) -> None:
    generation = GenerationSpec(temperature=0.7)
    opts = options(shared_engine_python, job_id="s", generation=generation, reuses_results=True)
    rows = run_prompts(["the same"] * 8, opts)
    assert Counter(row["text"] for row in rows) == {expected_text("the same"): 8}
    assert server_stats(opts).jobs["s"].rows_reused == 0
