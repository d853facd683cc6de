"""Whose state the workers keep, and how they are told of those who come back."""

import pickle
import pickletools
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from pipemax.vllm_ext.scheduler.worker_slots import RunnerSlots, WorkerState
from tests.unit.vllm_ext.fake_worker import make_request


@pytest.fixture(autouse=True, scope="module")
def hashes_begin() -> None:
    """Do what a scheduler's start does for the hashes of requests; there is none here."""
    init_none_hash(sha256)


def started(*names: str) -> list[Any]:
    return [SimpleNamespace(request_id=name) for name in names]


def test_the_request_parked_longest_gives_up_its_slot() -> None:
    slots = RunnerSlots(3)
    assert slots.take(["a", "b", "c"]) == []
    for name in ("b", "a"):
        slots.leave_gpu(name)
    assert slots.take(["d"]) == ["b"]
    assert "a" in slots
    assert "b" not in slots


def test_a_prefetched_request_keeps_its_slot() -> None:
    slots = RunnerSlots(2)
    slots.take(["a", "b"])
    slots.leave_gpu("a")
    slots.leave_gpu("b")
    slots.note_prefetch("a")
    assert slots.take(["c"]) == ["b"]
    slots.release("a")
    assert len(slots) == 1


def test_more_residents_than_slots_are_a_fault() -> None:
    slots = RunnerSlots(1)
    slots.take(["a"])
    with pytest.raises(AssertionError, match="2 requests on the GPU, 1 slots"):
        slots.take(["b"])


def test_the_workers_are_told_what_they_lack() -> None:
    workers = WorkerState(3)
    workers.news([], ["a", "b", "c"])
    workers.leave_gpu("b")
    workers.leave_gpu("c")
    assert workers.news([], ["d"]).dropped == ["b"]
    for name in ("b", "c"):
        workers.note_prefetch(name)
    workers.leave_gpu("d")
    running = started("a", "b", "c")
    news = workers.news(running, ["a", "b", "c"])
    assert news == (running[:1], running[2:], running[1:2], ["d"])
    assert workers.news(running, ["a", "b", "c"]).known == running


def test_a_prefetched_request_that_was_evicted_before_it_ran_is_announced_when_it_runs() -> None:
    workers = WorkerState(2)
    workers.news([], ["a"])
    workers.leave_gpu("a")
    workers.note_prefetch("a")
    workers.leave_gpu("a")
    workers.note_prefetch("a")
    running = started("a")
    assert workers.news(running, ["a"]).moved == running


def test_a_request_that_lost_its_slot_is_sent_in_as_many_parts_however_long_it_is() -> None:
    def num_parts(num_tokens: int) -> int:
        request = make_request("a", [7] * num_tokens, max_tokens=4)
        request.append_output_token_ids([8, 9])
        message = pickle.dumps(WorkerState(4).resend(request, ([0],)), pickle.HIGHEST_PROTOCOL)
        received = pickle.loads(message)
        assert [*received.prefill_token_ids] == [7] * num_tokens + [8, 9]
        assert received.prompt_len == num_tokens
        return sum(1 for _ in pickletools.genops(message))

    assert num_parts(5_000) == num_parts(3)


def test_a_token_that_is_sent_again_takes_four_bytes_of_the_message() -> None:
    def num_bytes(num_tokens: int) -> int:
        request = make_request("a", [70_000] * num_tokens, max_tokens=4)
        return len(pickle.dumps(WorkerState(4).resend(request, ([0],)), pickle.HIGHEST_PROTOCOL))

    assert num_bytes(5_000) - num_bytes(3_000) == 4 * 2_000


def test_a_request_that_is_sent_again_has_the_tokens_that_it_got_since() -> None:
    workers = WorkerState(4)
    request = make_request("a", [1, 2, 3], max_tokens=9)
    request.append_output_token_ids([4])
    first = workers.resend(request, ([0],))
    request.append_output_token_ids([5, 6])
    second = workers.resend(request, ([1],))
    assert [*first.prefill_token_ids] == [1, 2, 3, 4]  # which the workers may not have read yet
    assert [*second.prefill_token_ids] == [1, 2, 3, 4, 5, 6]
    assert (second.prompt_len, second.block_ids) == (3, ([1],))


def test_the_tokens_of_a_released_request_are_not_those_of_another_with_its_id() -> None:
    workers = WorkerState(4)
    workers.resend(make_request("a", [1, 2, 3], max_tokens=9), ([0],))
    workers.release("a")
    assert [*workers.resend(make_request("a", [7], max_tokens=9), ([0],)).prefill_token_ids] == [7]
