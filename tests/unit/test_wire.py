"""The wire's messages survive their own encoding, and processes are told apart."""

import json
import os
import subprocess
import sys
import time

import pytest

from pipemax.wire import (
    CollectorAddress,
    GenerationSpec,
    JobStats,
    MessageKind,
    PreflightReply,
    PreflightRequest,
    ProcessIdentity,
    ServerMessage,
    ServerStats,
    SessionErrorCode,
    SessionHeader,
)

HEADER = SessionHeader(
    job_id="job",
    task="stage 1 partition 2 attempt 0",
    daemon=ProcessIdentity(pid=9, start_ticks=19),
    engine={"model": "m", "vllm": {"a": [1, 2]}},
    generation=GenerationSpec(
        system="Be brief — ja",
        stop=("\n", "é"),
        response_format='{"type": "object"}',
        seed=7,
        choice=("a", "b"),
    ),
    collector=CollectorAddress(host="h", port=1, token="t"),
)


def test_messages_come_back_equal() -> None:
    assert SessionHeader.from_bytes(HEADER.to_bytes()) == HEADER
    for message in (
        ServerMessage(kind=MessageKind.CREDIT, credit_rows=3, credit_bytes=4),
        ServerMessage(kind=MessageKind.FAILED, code=SessionErrorCode.ENGINE_CONFLICT, detail="why"),
    ):
        assert ServerMessage.from_bytes(message.to_bytes()) == message
    stats = ServerStats(
        server_id="s",
        host="h",
        pid=1,
        at_unix_s=2.5,
        state="ready",
        jobs={"j": JobStats(errors={"empty_prompt": 2})},
    )
    assert ServerStats.from_bytes(stats.to_bytes()) == stats
    request = PreflightRequest(
        engine={"model": "m"}, generation=HEADER.generation, requests=[{"prompt": "a"}, {"prompt": None}]
    )
    assert PreflightRequest.from_bytes(request.to_bytes()) == request
    reply = PreflightReply(error="e", prompt_tokens=[1])
    assert PreflightReply.from_bytes(reply.to_bytes()) == reply


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"not json", b'{"wire_version": 1}'])
def test_bytes_that_are_not_a_header_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="session header"):
        SessionHeader.from_bytes(text)


def test_the_versions_of_a_later_header_can_be_read() -> None:
    later = json.dumps({"wire_version": 99, "package_version": "9.9", "something": "new"}).encode()
    assert SessionHeader.versions_of(later) == (99, "9.9")
    assert SessionHeader.versions_of(b"junk") == (None, None)


def test_a_process_is_running_until_it_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    assert identity.is_running()
    process.kill()
    deadline_s = time.monotonic() + 60
    while identity.is_running() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not identity.is_running(), "a zombie counts as ended"
    process.wait()
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(process.pid)


def test_another_process_of_the_same_pid_is_not_taken_for_the_first() -> None:
    own = ProcessIdentity.of_this_process()
    assert own.pid == os.getpid()
    assert not ProcessIdentity(pid=own.pid, start_ticks=own.start_ticks - 1).is_running()
