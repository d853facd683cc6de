"""What tests of real servers share: the engine of an endpoint, demo rows, and how answers are compared."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from pipemax.api import Completion, GenerationRequest, OfflineEngine, Sampling
from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoints.probe import probe
from tests.endpoints.servers import KEY, REPOSITORY, SERVED_NAME, ModelServer
from tests.spark.delta_log import committed_files
from tests.spark.processes import SMALL_SPARK

KEY_VARIABLE = "REAL_SERVER_KEY"
TEMPLATE = "Package: {package}\nSummary: {summary}\nDescription: {description}"
_DEMO_TABLE = REPOSITORY / "examples" / "data" / "debian_packages.parquet"


def endpoint_values(server: ModelServer, **more: Any) -> dict[str, Any]:
    """Return an engine config, as YAML would have it, for a server."""
    values = {"endpoint": server.url, "model": SERVED_NAME, "model_revision": "1"}
    return values | {"api_key_env": KEY_VARIABLE} | more


def endpoint_config(server: ModelServer, *asked: Sampling, **more: Any) -> EndpointConfig:
    """Return the config with its key and with what the probe finds for what is asked."""
    config = EndpointConfig.parse(endpoint_values(server, **more)).with_keys({KEY_VARIABLE: KEY})
    return config.model_copy(update={"server": probe(config, asked).server})


@contextmanager
def endpoint_engine(server: ModelServer, *asked: Sampling, **more: Any) -> Iterator[OfflineEngine]:
    """Yield the engine that a job would start, whose check has probed the server."""
    with OfflineEngine(endpoint_config(server, *asked, **more)) as engine:
        yield engine


def demo_rows(number: int) -> dict[str, str]:
    """Return the first prompts of the demo table by package."""
    rows = pq.read_table(_DEMO_TABLE).slice(0, number).to_pylist()
    return {row["package"]: TEMPLATE.format(**row) for row in rows}


def demo_prompts(number: int) -> list[str]:
    return [*demo_rows(number).values()]


class DemoJob:
    """The command over the first rows of the demo table, as often as it is run."""

    def __init__(self, directory: Path, engine: dict[str, Any], *arguments: str, rows: int) -> None:
        """``directory`` must not be there yet; all that the job writes is in it."""
        directory.mkdir()
        self.directory = directory
        pq.write_table(pq.read_table(_DEMO_TABLE).slice(0, rows), directory / "rows.parquet")
        (directory / "engine.yaml").write_text(yaml.safe_dump(engine))
        self._command = [
            *(sys.executable, str(REPOSITORY / "jobs" / "annotate.py"), "--template", TEMPLATE),
            *("--input", str(directory / "rows.parquet"), "--output", str(directory / "out")),
            *("--engine", str(directory / "engine.yaml"), "--id-columns", "package", "--max-tokens", "24"),
            *("--summary", str(directory / "summary.json"), "--log-dir", str(directory / "logs")),
            *("--mlflow-experiment", "", *arguments),
        ]

    def run(self, *arguments: str) -> dict[str, Any]:
        """Return the run's summary."""
        submit = f"--master local[2] {SMALL_SPARK} pyspark-shell"
        done = subprocess.run(
            [*self._command, *arguments],
            cwd=self.directory,
            env={**os.environ, "PYSPARK_SUBMIT_ARGS": submit, KEY_VARIABLE: KEY},
            capture_output=True,
            text=True,
            check=False,
        )
        (self.directory / "printed.txt").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    def answers(self) -> dict[str, dict[str, Any]]:
        """Return the annotations by package; a package has one row only."""
        files = committed_files(self.directory / "out")
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        answers = {row["package"]: row["annotation"] for row in rows}
        assert len(answers) == len(rows)
        return answers

    def files_with(self, text: str) -> list[Path]:
        """Return the files with this text. Those of Parquet are read as the rows that they hold."""
        return [
            file
            for file in self.directory.rglob("*")
            if file.is_file()
            and text in (str(pq.read_table(file)) if file.suffix == ".parquet" else _text_of(file))
        ]


def _text_of(file: Path) -> str:
    return file.read_bytes().decode(errors="replace")


def completions(engine: OfflineEngine, prompts: Sequence[str | None], sampling: Sampling) -> list[Completion]:
    """Return the prompts' completions, in their order."""
    requests = [
        GenerationRequest(request_id=str(number), prompt=prompt, sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]
    return sorted(engine.generate(requests), key=lambda completion: int(completion.request_id))


EXACT = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "samples", "agreement", "attempts")
NEAR = ("logprob_sum", "logprob_mean", "probability")


def assert_equal_answers(
    found: Sequence[Completion], expected: Sequence[Completion], *, but: Sequence[str] = ()
) -> None:
    """Compare answers, those numbers that come of float32 arithmetic up to its error."""
    for one, other in zip(found, expected, strict=True):
        assert (one.error and one.error.code) == (other.error and other.error.code), (one.error, other.error)
        for name in set(EXACT) - set(but):
            assert getattr(one, name) == getattr(other, name), (name, one, other)
        for name in set(NEAR) - set(but):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-3), (name, one, other)
