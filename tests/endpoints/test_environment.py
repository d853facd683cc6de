"""An endpoint needs what ``pipemax-spark[endpoint]`` installs, and neither torch, vLLM nor transformers."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from pipemax.wire import GenerationSpec, PreflightReply, PreflightRequest
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.server_process import EXECUTOR_VARIABLE
from tests.endpoints.openai_server import OpenAIServer, openai_server
from tests.serve.support import FakeJvm, run_prompts, server_stats, shut_down
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
THIN = f"""#!{sys.executable}
import runpy, sys

class OnlyInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{missing}}:
            raise ModuleNotFoundError("not in this environment: " + name)

sys.meta_path.insert(0, OnlyInstalled())
sys.path.insert(0, {str(REPOSITORY / "engine")!r})
module = sys.argv[2]
sys.argv = [module, *sys.argv[3:]]
runpy.run_module(module, run_name="__main__")
"""
"""A Python that has the given modules not."""


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def installed() -> set[str]:
    """The packages that ``pip install pipemax-spark[endpoint]`` brings, with what they need."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["endpoint"]]
    found: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = normal(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
        if name not in found and "extra ==" not in requirement:
            found.add(name)
            try:
                wanted += metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # for another Python or system
                continue
    return found


@pytest.fixture(scope="module")
def thin_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    packages = installed()
    missing = {
        module
        for module, of_packages in metadata.packages_distributions().items()
        if module.isidentifier()
        and module != "pipemax"
        and not any(normal(one) in packages for one in of_packages)
    }
    assert {"torch", "vllm", "transformers", "jinja2", "cuda", "pyspark"} <= missing
    path = tmp_path_factory.mktemp("thin") / "python"
    path.write_text(THIN.replace("{missing}", repr(missing)))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def jvm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJvm]:
    fake = FakeJvm()
    monkeypatch.setenv(EXECUTOR_VARIABLE, str(fake.pid))
    yield fake
    fake.kill()


def preflight(thin_python: str, server: OpenAIServer, generation: GenerationSpec) -> PreflightReply:
    request = PreflightRequest(engine=server.config(), generation=generation, requests=[{"prompt": "four"}])
    done = subprocess.run(
        [thin_python, "-m", "pipemax", "preflight"],
        input=request.to_bytes(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return PreflightReply.from_bytes(done.stdout)


def test_the_check_runs_with_the_extra_alone(thin_python: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"size": {"type": "integer"}}})
    with openai_server() as server:
        reply = preflight(thin_python, server, GenerationSpec(response_format=schema))
    assert reply.error == ""
    assert reply.prompt_tokens == [4]


def test_an_engine_server_runs_with_the_extra_alone(thin_python: str, jvm: FakeJvm) -> None:
    with openai_server() as server:
        options = EngineOptions(engine=server.config(metrics_port=0), job_id="job", engine_python=thin_python)
        rows = run_prompts(["a", "b"], options)
        assert server_stats(options).metrics_port
        shut_down(options)
        wait_until(lambda: not jvm.servers(), what="the server has ended")
    assert [row["text"] for row in rows] == ["said: a", "said: b"]
