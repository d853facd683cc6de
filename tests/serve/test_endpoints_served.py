"""An engine server whose engine is an endpoint, and what becomes of its sessions when the endpoint refuses all."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from pipemax.wire import SessionErrorCode
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.client import EngineOptions, complete
from pipemax_spark.executor.server_process import EXECUTOR_VARIABLE
from tests.endpoints.openai_server import OpenAIServer, openai_server
from tests.serve.support import FakeJvm, files_of, request_batches, run_prompts, server_of, server_stats
from tests.waiting import wait_until


def options(served: OpenAIServer, *, job_id: str = "job", **engine: Any) -> EngineOptions:
    return EngineOptions(engine=served.config(**engine), job_id=job_id)


def refused(opts: EngineOptions) -> EngineSessionError:
    with pytest.raises(EngineSessionError) as caught:
        run_prompts(["a"], opts)
    assert caught.value.code is SessionErrorCode.ENDPOINT_REFUSED
    return caught.value


def test_rows_are_answered_through_the_engine_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", "sk-right")
    with openai_server(key="sk-right") as server:
        rows = run_prompts(["a", "b", None], options(server, api_key_env="ENDPOINT_KEY"))
    assert [row["text"] for row in rows] == ["said: a", "said: b", None]
    assert rows[2]["error_code"] == "empty_prompt"


def test_a_refusal_ends_the_job_and_its_further_tasks_start_no_server_and_ask_nothing(jvm: FakeJvm) -> None:
    """Spark tries a failed task again, which would ask the endpoint and start servers in vain."""

    def forbids(path: str, body: dict[str, Any]) -> web.Response | None:
        return web.json_response({"error": {"message": "no"}}, status=403) if "chat" in path else None

    with openai_server(early=forbids) as server:
        first = refused(options(server))
        asked, identity = server.requests["/chat/completions"], server_of(options(server))
        for _ in range(3):
            again = refused(options(server))
        assert server.requests["/chat/completions"] == asked
        assert server_of(options(server)) == identity
        assert jvm.servers() == [identity]
        server.early = lambda path, body: None
        assert run_prompts(["a"], options(server, job_id="the next job"))[0]["text"] == "said: a"
    assert "forbids model 'demo'" in first.message
    assert "403, no" in first.message
    assert "not tried again in this job" in again.message


def test_rows_that_ended_before_the_refusal_are_delivered() -> None:
    answered = threading.Semaphore(20)

    def forbids_later(path: str, body: dict[str, Any]) -> web.Response | None:
        if "chat" in path and not answered.acquire(blocking=False):
            return web.json_response({"error": {"message": "no"}}, status=401)
        return None

    with openai_server(early=forbids_later) as server:
        completions = complete(request_batches(200, 50), options(server, max_concurrency=1), task="task")
        got: list[dict[str, Any]] = []
        with pytest.raises(EngineSessionError, match="refuses the key"):
            got.extend(row for batch in completions for row in batch.to_pylist())
        assert len(got) == len(server.bodies) == 20


def test_another_answering_model_ends_the_job_by_name() -> None:
    with openai_server(answers_as="demo-2") as server:
        found = {"kind": "vllm", "models": [{"id": "demo"}], "answers_as": "demo-1"}
        server.facts = {}
        error = refused(options(server, server=found))
    assert "answered as model 'demo-2', and the run began with 'demo-1'" in error.message


def test_engines_that_are_endpoints_take_no_gpu_and_wait_for_none(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two executors of one machine, whose GPUs are the same: the second engine would wait for the first one's."""
    other = FakeJvm()
    try:
        with openai_server() as server:
            run_prompts(["a"], options(server))
            monkeypatch.setenv(EXECUTOR_VARIABLE, str(other.pid))
            waits_little = replace(options(server), start_timeout_s=60.0)
            assert run_prompts(["b"], waits_little)[0]["text"] == "said: b"
            assert "waiting for GPU" not in files_of(waits_little).log.read_text()
            assert server_stats(waits_little).state == "ready"
    finally:
        other.kill()
        wait_until(lambda: not other.servers(), what="the server has ended")
