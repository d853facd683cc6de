"""How a job's options are made of what is given to it."""

from pathlib import Path

import pytest

from pipemax_spark.job.arguments import job_options


def model_of(model: str, adapter: str) -> tuple[str, str]:
    engine = {"model": model, "lora": {"polite": adapter}}
    given = {"input": "in", "output": "out", "template": "x", "engine": engine}
    made = job_options(given, log_dir=Path("logs")).engine
    return made["model"], made["lora"]["polite"]


def test_directories_are_given_to_servers_by_their_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    assert model_of("model", "hub/adapter") == (str(tmp_path / "model"), "hub/adapter")


def test_what_the_driver_may_not_look_into_is_left_to_the_preflight(tmp_path: Path) -> None:
    """As another user's home; a name that is too long is an error for root as well."""
    hidden = str(tmp_path / ("long" * 100))
    assert model_of("hub/name", hidden) == ("hub/name", hidden)
    assert model_of(hidden, "hub/adapter") == (hidden, "hub/adapter")
