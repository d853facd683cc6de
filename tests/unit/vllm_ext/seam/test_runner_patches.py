"""How requests are added to vLLM's V2 runner: with the runner's own state of requests, and without a runner."""

import pickle
from array import array
from types import SimpleNamespace
from typing import Any

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # puts plain memory in place of pinned memory
from vllm.v1.worker.gpu.states import RequestState

from pipemax.vllm_ext.seam.runner_patches import clear_no_drafts, stage_tokens_as_array


class Unread(array):  # type: ignore[type-arg]
    """Tokens that may be copied, and not read one by one."""

    def __iter__(self) -> Any:
        raise AssertionError("the tokens are read one by one")


def runner(num_slots: int = 4) -> Any:
    states = RequestState(
        max_num_reqs=num_slots,
        max_model_len=64,
        max_num_batched_tokens=64,
        num_speculative_steps=0,
        vocab_size=1000,
        device=torch.device("cpu"),
    )
    return SimpleNamespace(req_states=states)


def add(runner: Any, name: str, tokens: Any, prompt_len: int) -> None:
    runner.req_states.add_request(name, prompt_len, tokens, num_computed_tokens=prompt_len, max_tokens=9)


def staged(runner: Any) -> list[int]:
    """Return what vLLM would hand to its kernel."""
    tokens = runner.req_states.all_token_ids
    handed: torch.Tensor = tokens.write_contents.copy_to_uva(tokens._staged_write_contents)
    return [int(token) for token in handed]


def test_the_tokens_of_a_request_that_is_sent_again_are_never_read_one_by_one() -> None:
    one = runner()
    stage_tokens_as_array(one)
    add(one, "a", Unread("i", [1, 2, 70_000]), prompt_len=2)
    add(one, "b", pickle.loads(pickle.dumps(array("i", [4, 5]))), prompt_len=1)
    assert staged(one) == [1, 2, 70_000, 4, 5]


def test_a_new_request_s_list_of_tokens_is_staged_as_by_vllm() -> None:
    stock, ours = runner(), runner()
    stage_tokens_as_array(ours)
    for one in (stock, ours):
        add(one, "a", [1, 2, 3], prompt_len=3)
        add(one, "b", [4], prompt_len=1)
    tokens, stock_tokens = ours.req_states.all_token_ids, stock.req_states.all_token_ids
    assert tokens._staged_write_cu_lens == stock_tokens._staged_write_cu_lens == [3, 4]
    assert staged(ours) == staged(stock) == [1, 2, 3, 4]
    tokens.clear_staged_writes()
    add(ours, "c", [8, 9], prompt_len=2)
    assert staged(ours) == [8, 9]


def test_adding_a_request_makes_no_call_for_drafts_that_there_are_none_of() -> None:
    class Drafts:
        num_calls = 0

        def __getitem__(self, slot: int) -> torch.Tensor:
            Drafts.num_calls += 1
            return torch.empty(0)

    one = runner()
    drafts: Any = Drafts()
    one.req_states.draft_tokens = drafts
    one.add_requests = lambda name: add(one, name, [1], prompt_len=1)
    one.add_requests("stock")
    assert Drafts.num_calls == 1
    clear_no_drafts(one)
    one.add_requests("ours")
    assert Drafts.num_calls == 1
    assert one.req_states.draft_tokens is drafts
