"""How long an answer is given again, for sessions that reuse results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import fake_config
from tests.serve.support import options, run_prompts, server_stats

MakePython = Callable[..., str]
PROMPTS = [f"prompt {i}" for i in range(20)]


class Asker:
    """Asks one server the same questions by different engines."""

    def __init__(self, engine_python: str) -> None:
        self._engine_python = engine_python
        self._jobs = 0

    def rows_reused(self, model: str, **engine: Any) -> int:
        """Of the 20 prompts, asked again by this model."""
        self._jobs += 1
        job = f"job {self._jobs}"
        config = fake_config(model=model) | engine
        opts = options(self._engine_python, engine=config, job_id=job, reuses_results=True)
        run_prompts(PROMPTS, opts)
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
