"""Requests that wait for their grammars cost a step nothing until those are compiled."""

from concurrent.futures import Future
from typing import Any

from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from pipemax.vllm_ext.scheduler.blocked_requests import BlockedRequests
from tests.unit.vllm_ext.fake_worker import FakeCore, expected_output, make_request, make_scheduler


def make_blocked(name: str, grammar: Any) -> Any:
    request = make_request(name, [1, 2, 3], max_tokens=3)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = StructuredOutputRequest(params=None, _grammar=grammar)
    return request


def test_requests_are_taken_once_their_grammars_are_compiled() -> None:
    blocked = BlockedRequests()
    futures: list[Future[object]] = [Future() for _ in range(3)]
    requests = [make_blocked(str(index), future) for index, future in enumerate(futures)]
    for request in requests:
        blocked.add(request)
    assert blocked.take_compiled() == []
    futures[2].set_result(object())
    futures[1].set_exception(ValueError("no such rule"))
    assert blocked.take_compiled() == [requests[2], requests[1]]
    assert blocked.take_compiled() == []
    assert len(blocked) == 1


def test_a_request_whose_grammar_is_ready_is_taken_at_once() -> None:
    blocked = BlockedRequests()
    blocked.add(request := make_blocked("a", object()))
    assert blocked.take_compiled() == [request]


def test_an_aborted_request_is_not_taken_and_its_id_may_be_used_again() -> None:
    blocked = BlockedRequests()
    futures: list[Future[object]] = [Future(), Future()]
    first, second = (make_blocked("a", future) for future in futures)
    blocked.add(first)
    assert blocked.discard(first)
    blocked.add(second)
    futures[0].set_result(object())
    assert blocked.take_compiled() == []
    futures[1].set_result(object())
    assert blocked.take_compiled() == [second]


def test_no_step_looks_at_blocked_requests() -> None:
    core = FakeCore(make_scheduler(gpu_blocks=64, host_blocks=100, num_batches=2))
    handled: list[str] = []
    handle = core.scheduler._handle_blocked_waiting_request
    core.scheduler._handle_blocked_waiting_request = lambda request: (  # type: ignore[method-assign]
        handled.append(request.request_id) or handle(request)
    )
    for index in range(3):
        core.add(make_blocked(f"blocked-{index}", Future()))
    core.add(make_request("free", [5, 6, 7], max_tokens=4))
    while "free" in core.scheduler.requests:
        core.step()
    assert core.outputs["free"] == expected_output([5, 6, 7], 4)
    assert not [request_id for request_id in handled if request_id.startswith("blocked")]
