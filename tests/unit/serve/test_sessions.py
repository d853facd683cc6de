"""What the open sessions hear from the engine's thread, and what the engine hears of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipemax.api import Completion, GenerationRequest
from pipemax.config import EngineConfig
from pipemax.serve.flow.credit import CreditWindow
from pipemax.serve.flow.open_input import InputWatch
from pipemax.serve.job_stats import StatsBook
from pipemax.serve.lifecycle import EXIT_ENGINE_DIED, HURRIED_CLOSE_S, Exit, Lifecycle
from pipemax.serve.limits import Timings, WindowLimits
from pipemax.serve.rows.equal_requests import EqualRequests
from pipemax.serve.rows.journal import Journal
from pipemax.serve.rows.result_cache import ResultCache
from pipemax.serve.rows.turns import Turns
from pipemax.serve.sessions import EngineSessions
from pipemax.wire import ProcessIdentity, Spent
from tests.fakes.idle_engine import IdleEngine

CONFIG = EngineConfig(model="model")


class ListEngine(IdleEngine):
    """Remembers what it was given and told."""

    def __init__(self, credit_tokens: int = 0) -> None:
        super().__init__()
        self.submitted: list[str] = []
        self.heard_input: list[bool] = []
        self.credit_tokens = credit_tokens

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.submitted += [request.request_id for request in requests]

    def set_input_open(self, is_open: bool) -> None:
        self.heard_input.append(is_open)

    def admission_credit_tokens(self) -> int:
        return self.credit_tokens


class ListSession:
    def __init__(self) -> None:
        self.delivered: list[str] = []
        self.num_wakes = 0

    def deliver(self, completions: Sequence[Completion]) -> None:
        self.delivered += [completion.request_id for completion in completions]

    def wake(self) -> None:
        self.num_wakes += 1


class Bench:
    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.turns = Turns(Journal(path / "journal"))
        self.lifecycle = Lifecycle(ProcessIdentity.of_this_process(), Timings(), socket=path / "socket")
        self.stats = StatsBook()
        self.sessions = EngineSessions(
            window=CreditWindow(WindowLimits()),
            turns=self.turns,
            equals=EqualRequests(ResultCache(0)),
            inputs=InputWatch(lambda job_id: 0, clock=lambda: self.now_s),
            stats=self.stats,
            lifecycle=self.lifecycle,
        )

    def open(self, number: int) -> ListSession:
        session = ListSession()
        self.sessions.open(number, "job", session)
        return session


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_rows_go_to_the_session_that_sent_them_and_to_none_once_it_has_closed(bench: Bench) -> None:
    first, second = bench.open(1), bench.open(2)
    completions = [Completion(request_id=name, text="x") for name in ("1:0", "2:0", "1:1")]
    bench.sessions.rows_ended(completions)
    assert (first.delivered, second.delivered) == (["1:0", "1:1"], ["2:0"])
    bench.sessions.close(1, "job")
    bench.sessions.rows_ended(completions)
    assert (first.delivered, second.delivered) == (["1:0", "1:1"], ["2:0", "2:0"])
    assert bench.sessions.num_open == 1


def test_what_an_endpoint_was_asked_counts_for_its_job_also_after_the_session_has_gone(bench: Bench) -> None:
    for number, job_id in ((1, "one"), (2, "other")):
        bench.stats.open_session(job_id, None)
        bench.sessions.open(number, job_id, ListSession())
    ended = [
        Completion(request_id=name, spent=Spent(requests=2, retries=1, prompt_tokens=10, output_tokens=5))
        for name in ("1:0", "2:0", "1:1")
    ]
    bench.sessions.rows_ended(ended[:1])
    bench.sessions.close(1, "one")
    bench.sessions.rows_ended([*ended[1:], Completion(request_id="1:2")])
    assert {job_id: job.spent for job_id, job in bench.stats.jobs().items()} == {
        "one": Spent(requests=4, retries=2, prompt_tokens=20, output_tokens=10),
        "other": ended[0].spent,
    }


def test_each_engine_hears_of_its_input_only_when_that_changes(bench: Bench) -> None:
    engine, successor = ListEngine(), ListEngine()
    bench.now_s = 100.0
    bench.sessions.feed(engine, CONFIG)
    bench.open(1)
    for _ in range(3):
        bench.sessions.feed(engine, CONFIG)
    assert engine.heard_input == [False, True]
    bench.sessions.feed(successor, CONFIG)
    bench.sessions.end_input(1)
    bench.sessions.feed(successor, CONFIG)
    assert successor.heard_input == [True, False]


def test_the_sessions_wake_when_the_window_grows_and_not_when_it_shrinks(bench: Bench) -> None:
    session = bench.open(1)
    bench.sessions.feed(ListEngine(credit_tokens=0), CONFIG)
    assert session.num_wakes == 0, "until an engine has spoken, the window is at its maximum"
    bench.sessions.feed(ListEngine(credit_tokens=10**9), EngineConfig(model="larger"))
    assert session.num_wakes == 1


def test_a_session_that_ends_its_input_or_closes_wakes_the_others(bench: Bench) -> None:
    session = bench.open(1)
    bench.open(2)
    bench.sessions.end_input(2)
    assert session.num_wakes == 1
    bench.sessions.close(2, "job")
    assert session.num_wakes == 2


def test_a_dead_engine_s_rows_are_not_resent_before_the_sessions_hear_of_it_and_the_server_ends(
    bench: Bench,
) -> None:
    session, engine = bench.open(1), ListEngine()
    bench.sessions.engine_died()
    assert session.num_wakes == 0
    assert bench.turns.submit(engine, [GenerationRequest(request_id="1:0", prompt="x")], [b"k" * 16]) == []
    assert engine.submitted == []
    bench.sessions.death_announced("it broke")
    assert session.num_wakes == 1
    assert bench.lifecycle.wait() == Exit(
        reason="it broke", status=EXIT_ENGINE_DIED, close_within_s=HURRIED_CLOSE_S
    )
