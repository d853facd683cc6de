"""Rows through the endpoint's engine, as the engine server drives it, while servers break in every way."""

import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from pipemax.domain.errors import EngineDiedError
from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoints.engine import EndpointEngine
from pipemax.generation import Completion, GenerationRequest, Sampling
from pipemax.wire import ErrorCode
from tests.endpoints.faulty_server import HANG, MANY_FAULTS, NO_FAULT, SERVER_ERROR, FaultyServer
from tests.endpoints.openai_server import OpenAIServer, echo, serving
from tests.waiting import wait_until

PATIENCE_S = 120.0
SEED = 1
"""With it each kind of fault is some row's."""


def config_of(*servers: OpenAIServer, answers_as: str | None = None, **changes: Any) -> EndpointConfig:
    """Return a config as a job's check leaves it."""
    facts = {name: value for name, value in servers[0].facts.items() if name != "owned_by"}
    values = {
        "endpoint": [server.url for server in servers],
        "model": servers[0].model,
        "unpinned_model": True,
        "timeout_s": 60.0,
        "server": {"models": [{"id": servers[0].model, **facts}], "answers_as": answers_as},
    }
    return EndpointConfig.parse(values | changes)


@contextmanager
def running(config: EndpointConfig) -> Iterator[EndpointEngine]:
    engine = EndpointEngine(config)
    try:
        yield engine
    finally:
        engine.close()


def drive(engine: EndpointEngine, prompts: Iterable[str]) -> list[Completion]:
    """Return the ended rows in the order in which they ended; never more in flight than the engine wants."""
    left = [
        GenerationRequest(request_id=f"row {number}", prompt=prompt, sampling=Sampling(max_tokens=64))
        for number, prompt in enumerate(prompts)
    ]
    num_rows, ended = len(left), []
    deadline_s = time.monotonic() + PATIENCE_S
    left.reverse()
    while len(ended) < num_rows:
        room = int(engine.stats().metrics.get("wanted_rows", 0)) - (num_rows - len(left) - len(ended))
        if room > 0 and left:
            engine.submit([left.pop() for _ in range(min(room, len(left)))])
        ended += engine.poll(0.05)
        assert time.monotonic() < deadline_s, f"{num_rows - len(ended)} rows have no end"
    assert engine.poll(0.0) == []
    return ended


def assert_each_once(ended: list[Completion], prompts: list[str], *, without: Collection[str] = ()) -> None:
    """Check that each row has ended once, with its own answer."""
    rows = {f"row {number}" for number in range(len(prompts))} - set(without)
    assert sorted(completion.request_id for completion in ended) == sorted(rows)
    wrong = [
        completion
        for completion in ended
        if completion.error is not None
        or completion.text != echo(prompts[int(completion.request_id.removeprefix("row "))])
    ]
    assert wrong == []


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_thousand_rows_are_answered_once_each_whatever_breaks() -> None:
    prompts = [f"word {number}" for number in range(2000)]
    with (
        serving(FaultyServer(faults=MANY_FAULTS, seed=SEED)) as first,
        serving(FaultyServer(faults=MANY_FAULTS, seed=SEED)) as second,
        running(config_of(first, second)) as engine,
    ):
        ended = drive(engine, prompts)
        assert_each_once(ended, prompts)
        # A server counts an answer once it has written it, which may be after the engine has read it.
        wait_until(
            lambda: all(first.answered[one] + second.answered[one] for one in prompts), 30, "all are counted"
        )
        answered, broken, had = (
            getattr(first, name) + getattr(second, name) for name in ("answered", "broken", "had")
        )
        assert {prompt: answered[prompt] for prompt in prompts} == dict.fromkeys(prompts, 1)
        computed = Counter(first.prompts) + Counter(second.prompts)
        assert all(computed[prompt] <= 1 + broken[prompt] for prompt in prompts)
        assert set(had) == {NO_FAULT, *MANY_FAULTS}
        tries = Counter({prompt: first.tries[prompt] + second.tries[prompt] for prompt in prompts})
        assert sum(completion.spent.requests for completion in ended) >= tries.total()
        assert all(completion.spent.output_tokens > 0 for completion in ended)


def test_a_row_that_is_always_answered_500_is_an_error_and_no_other_row_is() -> None:
    prompts = [f"word {number}" for number in range(200)]
    with (
        serving(FaultyServer(fails=frozenset({"word 7"}), refuses_prompts=frozenset({"word 8"}))) as server,
        running(config_of(server, max_tries=3)) as engine,
    ):
        ended = drive(engine, prompts)
        errors = {
            completion.request_id: completion.error for completion in ended if completion.error is not None
        }
        assert set(errors) == {"row 7", "row 8"}
        assert errors["row 7"].code is errors["row 8"].code is ErrorCode.ENGINE_ERROR
        assert "failed this row 3 times while it answered others; at last: 500" in errors["row 7"].message
        assert "400" in errors["row 8"].message
        assert server.had[SERVER_ERROR] == 3
        assert_each_once(
            [completion for completion in ended if completion.error is None],
            prompts,
            without={"row 7", "row 8"},
        )


@pytest.mark.parametrize("is_closed", [True, False])
def test_rows_are_answered_by_the_other_address_while_one_is_dead(is_closed: bool) -> None:
    prompts = [f"word {number}" for number in range(300)]
    with serving(FaultyServer()) as alive, serving(FaultyServer(is_dead=True)) as dead:
        if is_closed:
            dead.port = closed_port()
        with running(config_of(dead, alive)) as engine:
            ended = drive(engine, prompts)
        assert_each_once(ended, prompts)
        wait_until(lambda: all(alive.answered[one] for one in prompts), 30, "all are counted")
        assert {prompt: alive.answered[prompt] for prompt in prompts} == dict.fromkeys(prompts, 1)


def test_requests_without_an_answer_are_sent_again_after_the_time_out() -> None:
    prompts = [f"word {number}" for number in range(60)]
    with (
        serving(FaultyServer(faults={HANG: 0.1}, seed=SEED)) as server,
        running(config_of(server, timeout_s=1.0)) as engine,
    ):
        assert_each_once(drive(engine, prompts), prompts)
        assert server.had[HANG] > 0


def test_another_model_in_mid_run_ends_the_run_by_name() -> None:
    prompts = [f"word {number}" for number in range(200)]
    with serving(FaultyServer()) as server, running(config_of(server, answers_as="demo")) as engine:
        drive(engine, prompts)
        server.answers_as = "demo-2"
        with pytest.raises(
            EngineDiedError, match="answered as model 'demo-2', and the run began with 'demo'"
        ):
            drive(engine, prompts)


def test_a_redirect_to_another_host_ends_the_run_and_sends_nothing_there() -> None:
    def moved(path: str, body: dict[str, Any]) -> web.Response | None:
        if path != "/chat/completions":
            return None
        return web.Response(status=307, headers={"Location": f"{elsewhere.url}{path}"})

    with (
        serving(OpenAIServer()) as elsewhere,
        serving(OpenAIServer(early=moved)) as server,
        running(config_of(server)) as engine,
    ):
        with pytest.raises(EngineDiedError, match="redirects to"):
            drive(engine, ["word 1"])
        assert elsewhere.requests == Counter()
