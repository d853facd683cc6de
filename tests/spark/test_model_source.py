"""Models of MLflow's registry, in a real one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.engines.config import DIRECTORY_VARIABLE, engine_config
from pipemax_spark.errors import JobError


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry with two versions of one model, and a version of another that is no checkpoint."""
    import mlflow

    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "copies"))
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    client = mlflow.MlflowClient()
    for name, config in (("one", "config.json"), ("two", "model/config.json")):
        file = tmp_path / "source" / name / config
        file.parent.mkdir(parents=True)
        file.write_text(f'{{"name": "{name}"}}')
    (tmp_path / "source" / "two" / "components" / "tokenizer").mkdir(parents=True)
    (tmp_path / "source" / "two" / "components" / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "none").mkdir()
    (tmp_path / "source" / "none" / "weights.pkl").touch()
    client.create_registered_model("summariser")
    for name in ("one", "two"):
        client.create_model_version("summariser", source=(tmp_path / "source" / name).as_uri())
    client.set_registered_model_alias("summariser", "champion", "2")
    client.create_registered_model("other")
    client.create_model_version("other", source=(tmp_path / "source" / "none").as_uri())
    yield client
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


@pytest.mark.long  # a registry of MLflow's
def test_a_registered_model_is_copied_once_and_loaded_as_a_directory(registry: Any, tmp_path: Path) -> None:
    config = engine_config({"max_model_len": 8}, "models:/summariser/1")
    assert config == {"max_model_len": 8, "model": str(tmp_path / "copies" / "summariser" / "1")}
    assert Path(config["model"], "config.json").read_text() == '{"name": "one"}'
    shutil.rmtree(tmp_path / "source" / "one")
    assert engine_config(None, "models:/summariser/1")["model"] == config["model"]

    by_alias = engine_config({"model": "models:/summariser@champion"}, None)
    copy = tmp_path / "copies" / "summariser" / "2"
    assert by_alias == {"model": str(copy / "model"), "tokenizer": str(copy / "components" / "tokenizer")}

    for name, reason in (
        ("models:/summariser", "name a version or an alias"),
        ("models:/summariser/9", "could not be read from MLflow's registry"),
        ("models:/summariser@nobody", "could not be read from MLflow's registry"),
        ("models:/other/1", "no config.json"),
    ):
        with pytest.raises(JobError, match=reason):
            engine_config(None, name)
    assert not list((tmp_path / "copies" / "summariser").glob(".part-*")), "no part of a copy is left"
