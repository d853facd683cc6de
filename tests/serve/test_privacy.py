"""Only its user can read what a server leaves on its machine."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.executor.client import complete
from tests.serve.support import FakeJvm, files_of, options, request_batch, run_prompts

EnginePython = Callable[..., str]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("jvm")
def test_socket_and_files_are_private_even_under_a_generous_umask(
    fake_engine_python: EnginePython, tmp_path: Path
) -> None:
    generous = os.umask(0)
    try:
        opts = options(fake_engine_python(), log_dir=str(tmp_path / "logs"))
        assert run_prompts(["a"], opts)[0]["error_code"] is None
    finally:
        os.umask(generous)
    files = files_of(opts)
    assert mode(files.socket.parent) == 0o700
    found = [path for path in files.socket.parent.iterdir() if path.stem == files.socket.stem]
    assert {path.suffix for path in found} >= {".sock", ".json", ".lock", ".journal"}
    assert {path.name: oct(mode(path) & 0o077) for path in [*found, files.log]} == {
        path.name: "0o0" for path in [*found, files.log]
    }


def test_a_prompt_is_in_no_file_of_the_server(fake_engine_python: EnginePython, jvm: FakeJvm) -> None:
    opts = options(fake_engine_python(), generation=GenerationSpec(system="a system message of its own"))
    prompt = "patient 4711 said this"
    # Read while the row is in the engine, and again once it has gone.
    rows = complete([request_batch([f"[[slow 1]] {prompt}", prompt])], opts, task="task")
    for _ in rows:
        files = files_of(opts)
        for path in [files.log, *files.socket.parent.glob(f"{files.socket.stem}.*")]:
            if not stat.S_ISSOCK(path.stat().st_mode):
                content = path.read_bytes()
                assert b"4711" not in content, path.name
                assert b"a system message" not in content, path.name
    assert jvm.servers(), "the files were those of a server that ran"
