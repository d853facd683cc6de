"""Pytest fixtures around the fake engine. In a conftest:

    from tests.fakes.fixtures import fake_engine_python  # noqa: F401

``fake_engine_python("--idle-exit-s=2")`` makes an executable to be passed as ``engine_python``; with
``tests.fakes.engine.fake_config(latency_s=0.1)`` as the engine config. Each executable has its own server in each
executor; a server ends with its executor, or 5 s after its last daemon.
"""

import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.engine_python import write_engine_python


@pytest.fixture
def fake_engine_python(tmp_path: Path) -> Callable[..., str]:
    """Makes executables that stand in for the engine's Python; arguments are further flags of the server."""
    numbers = itertools.count(1)

    def make(*server_flags: str) -> str:
        return write_engine_python(tmp_path / f"engine-python-{next(numbers)}", *server_flags)

    return make


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Three GPUs that no other test knows, as an ``nvidia-smi`` on the PATH lists them."""
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(3)]
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    lines = "\n".join(f"{index}, {name}" for index, name in enumerate(uuids))
    smi.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield uuids
    for file in Path(f"/tmp/pipemax-{os.getuid()}/gpus").glob("*"):
        if file.stem in uuids:
            file.unlink()
