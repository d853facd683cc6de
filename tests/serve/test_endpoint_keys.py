"""An endpoint's key reaches the engine with each session, and nothing else of the server has it."""

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipemax.wire import SessionErrorCode, Spent
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.client import EngineOptions
from tests.endpoints.keys_server import BROKEN, FILTERED, REFUSED, SAID, KeysServer, keys_server
from tests.serve.support import FakeJvm, files_of, options, run_prompts, server_of, server_stats, shut_down
from tests.waiting import wait_until

KEY = "sk-canary/of+this=test"
VARIABLE = "CANARY_API_KEY"


@pytest.fixture(scope="module")
def server() -> Iterator[KeysServer]:
    with keys_server(KEY) as served:
        yield served


@pytest.fixture
def opts(server: KeysServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineOptions:
    monkeypatch.setenv(VARIABLE, KEY)
    return options(sys.executable, engine=server.config(api_key_env=VARIABLE), log_dir=str(tmp_path / "logs"))


def held_in(opts: EngineOptions) -> set[str]:
    """Where the key is: files that the server has written, and what any process of this machine shows of itself."""
    files = files_of(opts)
    written = [path for path in files.socket.parent.iterdir() if not stat.S_ISSOCK(path.stat().st_mode)]
    written += list(files.log.parent.iterdir())
    written += [Path(f"/proc/{server_of(opts).pid}/environ"), *Path("/proc").glob("[0-9]*/cmdline")]
    assert files.log in written
    return {str(path) for path in written if holds_key(path)}


def holds_key(path: Path) -> bool:
    try:
        return KEY.encode() in path.read_bytes()
    except OSError:  # a process that has ended, or another user's
        return False


def test_a_key_is_in_no_file_or_process_s_shown_state_while_its_server_is_used_and_restarted(
    opts: EngineOptions, server: KeysServer, jvm: FakeJvm
) -> None:
    rows = run_prompts(["hello", REFUSED, FILTERED, SAID, BROKEN], opts)
    assert [row["error_code"] for row in rows] == [None, "engine_error", "content_filter", None, None]
    assert rows[0]["text"] == "reply to hello"
    assert rows[1]["error_message"] == f"the engine refused the row (400): *** may not ask for {REFUSED}"
    assert KEY not in str(rows), "nor in what the server says, good or bad"
    assert held_in(opts) == set()
    [job] = server_stats(opts).jobs.values()
    assert job.spent == Spent(requests=6, retries=1, prompt_tokens=7, output_tokens=12)

    [first] = jvm.servers()
    shut_down(opts)
    wait_until(lambda: jvm.servers() == [], what="the server has ended")
    assert run_prompts(["again"], opts)[0]["text"] == "reply to again"
    assert jvm.servers() != [first]
    assert held_in(opts) == set()
    assert server.headers_with(f"Bearer {KEY}") == len(server.seen), "every request had it"


def test_a_key_that_is_refused_ends_the_run_in_a_sentence_without_it(
    opts: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "sk-canary-wrong")
    with pytest.raises(EngineSessionError) as refused:
        run_prompts(["hello"], opts)
    assert f"refuses the key ({VARIABLE}): 401, no such key; {KEY} is right" in str(refused.value), (
        "a key of somebody else's is nothing that this engine knows"
    )
    assert "sk-canary-wrong" not in str(refused.value)


@pytest.mark.parametrize("value", ["", "two\nlines"])
def test_a_variable_without_a_usable_key_is_named(
    opts: EngineOptions, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(EngineSessionError, match=rf"the environment variable {VARIABLE} ") as refused:
        run_prompts(["hello"], opts)
    assert refused.value.code is SessionErrorCode.INVALID_ENGINE_CONFIG
    assert "lines" not in str(refused.value)
