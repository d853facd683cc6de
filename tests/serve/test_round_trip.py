"""Every row exactly once, whatever the batches and however many sessions."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax.wire import COMPLETION_SCHEMA, ErrorCode, GenerationSpec
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.client import complete
from tests.fakes.pooled import vector
from tests.fakes.settings import fake_config
from tests.serve.support import (
    FakeJvm,
    assert_exactly_once,
    at_once,
    files_of,
    options,
    request_batch,
    request_batches,
    run_prompts,
    server_stats,
)

EnginePython = Callable[..., str]
_REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("rows", "batch_rows"), [(300, 1), (3_000, 64), (20_000, 10_000)])
def test_each_row_comes_back_once(shared_engine_python: str, rows: int, batch_rows: int) -> None:
    opts = options(shared_engine_python, max_num_seqs=512)
    batches = list(complete(request_batches(rows, batch_rows), opts, task="task"))
    assert_exactly_once(batches, rows)
    assert all(batch.schema.equals(COMPLETION_SCHEMA, check_metadata=True) for batch in batches)


def test_two_sessions_of_one_process_share_an_engine(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python(), max_num_seqs=64)
    for batches in at_once(
        lambda task: list(complete(request_batches(2_000, 100), opts, task=task)), ["task 0", "task 1"]
    ):
        assert_exactly_once(batches, 2_000)
    stats = server_stats(opts)
    assert (stats.engine_starts, stats.jobs["job"].rows_done) == (1, 4_000)


def test_processes_that_start_at_once_share_one_server(
    fake_engine_python: EnginePython, jvm: FakeJvm
) -> None:
    engine_python, client = fake_engine_python(), "tests.serve.client_process"
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", client, engine_python, "1000", "64", f"task {number}"],
            cwd=_REPOSITORY,
        )
        for number in range(3)
    ]
    assert [process.wait(60) for process in clients] == [0] * 3
    assert len(jvm.servers()) == 1
    stats = server_stats(options(engine_python))
    assert (stats.engine_starts, stats.jobs["job"].rows_done) == (1, 3 * 1000)
    log = files_of(options(engine_python)).log.read_text()
    assert log.count("listening") == 1


def test_without_rows_no_server_starts(fake_engine_python: EnginePython, jvm: FakeJvm) -> None:
    opts = options(fake_engine_python())
    assert list(complete([], opts, task="task")) == []
    assert list(complete([request_batch([])], opts, task="task")) == []
    assert jvm.servers() == []


def test_bad_rows_become_error_rows_and_good_rows_are_answered(shared_engine_python: str) -> None:
    invalid = {"max_tokens": 0}
    overrides = [None, None, None, invalid, {"max_tokens": 2}, {"temperature": float("nan")}]
    rows = run_prompts(
        ["good", None, " ", "bad override", "one two three", "not a number"],
        options(shared_engine_python),
        overrides=overrides,
    )
    assert [row["error_code"] for row in rows] == [
        None,
        ErrorCode.EMPTY_PROMPT,
        ErrorCode.EMPTY_PROMPT,
        ErrorCode.INVALID_PARAMETER,
        None,
        ErrorCode.INVALID_PARAMETER,
    ]
    assert "max_tokens is 0" in rows[3]["error_message"]
    assert (rows[4]["text"], rows[4]["finish_reason"], rows[4]["completion_tokens"]) == (
        "reply to",
        "length",
        2,
    )
    assert all(row["text"] is None and row["finish_reason"] is None for row in rows if row["error_code"])


def test_a_sampled_row_gets_the_same_seed_in_every_attempt(shared_engine_python: str) -> None:
    sampled = GenerationSpec(temperature=0.7, seed=11)
    prompts = ["[[seed]] one", "[[seed]] two"]
    engine_python = shared_engine_python
    first = [row["text"] for row in run_prompts(prompts, options(engine_python, generation=sampled))]
    again = [row["text"] for row in run_prompts(prompts, options(engine_python, generation=sampled))]
    unseeded = GenerationSpec(temperature=0.7)
    drawn_anew = [row["text"] for row in run_prompts(prompts, options(engine_python, generation=unseeded))]
    assert first == again
    assert first[0] != first[1]
    assert drawn_anew == ["None", "None"]


def test_a_session_embeds_and_one_with_another_task_than_its_engine_is_refused(
    shared_engine_python: str,
) -> None:
    engine = fake_config("embeds") | {"task": "embed"}
    opts = options(shared_engine_python, generation=GenerationSpec(task="embed"), engine=engine)
    good, empty, again = run_prompts(["a b", " ", "a b"], opts)
    assert good["embedding"] == again["embedding"] == vector("a b").tolist()
    assert (good["text"], good["completion_tokens"], good["prompt_tokens"]) == (None, 0, 2)
    assert (empty["error_code"], empty["embedding"]) == (ErrorCode.EMPTY_PROMPT, None)
    other = options(shared_engine_python, generation=GenerationSpec(), engine=engine)
    with pytest.raises(
        EngineSessionError, match="the job's task is generate, and the engine config's is embed"
    ):
        run_prompts(["a"], other)
