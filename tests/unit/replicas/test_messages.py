"""What is said to a replica and by it, is heard as it was said."""

import socket
from dataclasses import replace

import pytest

from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.engine import EngineStats
from pipemax.generation import Completion, GenerationRequest, Image, Message, RequestError, Sampling
from pipemax.replicas.messages import (
    Abort,
    Ended,
    InputOpen,
    Report,
    SetLimits,
    Started,
    Steps,
    Submit,
    TakeSteps,
    line_of,
    lines_of,
    read_line,
)
from pipemax.replicas.messages import (
    Message as ReplicaMessage,
)

LIMITS = StepLimits(step_tokens=8192, running_rows=640)
CHAT = GenerationRequest(
    request_id="7.1",
    messages=(Message(role="user", content="line\nline\u2028é"),),
    system="Be brief.",
    sampling=Sampling(max_tokens=3, temperature=0.5, stop=("\n",), seed=2**62, response_format="{}"),
)
SHOWN = GenerationRequest(
    request_id="8.1",
    messages=(Message(role="user", content=(Image(content=b"\xff\xfe\n/+"), "what?", Image(source="/a"))),),
)
ANSWERS = (
    Completion(request_id="1", text="a\nb", finish_reason="stop", completion_tokens=2, token_ids=(5, 6)),
    Completion(request_id="2", error=RequestError(code="engine_error", message="no")),
    Completion(request_id="3", embedding=bytes(range(256))),
    Completion(request_id="4", label="yes", probabilities=(("yes", 0.75), ("no", 0.25)), score=0.5),
)


@pytest.mark.parametrize(
    "message",
    [
        Submit(number=2, requests=(CHAT, SHOWN)),
        Abort(request_ids=("1", "2")),
        InputOpen(is_open=True),
        SetLimits(limits=LIMITS),
        TakeSteps(),
        Ended(completions=ANSWERS),
        Started(policy={"chosen": "vllm", "settings": {"mixed_step_tokens": 256}}),
        Started(most_limits=LIMITS),
        Steps(records=StepRecords.none().to_plain()),
        Report(stats=EngineStats(phase="decode", metrics={"evictions": 2.0}), credit_tokens=-5, heard=3),
    ],
)
def test_what_is_said_to_a_replica_and_by_it_is_heard_as_it_was_said(message: ReplicaMessage) -> None:
    line = line_of(message)
    assert line.count(b"\n") == 1
    assert read_line(line) == message


def test_text_that_is_not_utf_8_ends_nobody() -> None:
    odd = Ended(completions=(Completion(request_id="1", text="a\udc80b"), *ANSWERS))
    heard = read_line(line_of(odd))
    assert isinstance(heard, Ended)
    assert heard.completions == (Completion(request_id="1", text="a?b"), *ANSWERS)
    told = read_line(line_of(Submit(number=1, requests=(replace(SHOWN, system="a\udc80"),))))
    assert isinstance(told, Submit)
    assert told.requests == (replace(SHOWN, system="a?"),)


def test_a_line_that_a_death_cut_short_is_dropped() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(b"whole\nhal")
        assert list(lines_of(ours)) == [b"whole\n"]
