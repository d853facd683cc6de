"""Waiting prompts and the GPU's block pool, as every system that keeps KV only on the GPU has them."""

from collections import deque
from dataclasses import dataclass

from pipemax.domain.kv_groups import WHOLE_KV, KvGroups
from pipemax.sim.stage_times import StepWork, prompt_pairs, window_pairs
from pipemax.sim.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request that needs a prefill: its first, or another after a preemption."""

    request: int
    tokens: int
    """Own tokens to compute: the prompt without the shared prefix, and the output so far."""
    outputs: int
    """Output tokens still to come, the prefill's own token included."""


class BlockPool:
    """Counts one pool's blocks; those of the shared prefix are taken once, at the start."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        shared_tokens: int,
        groups: KvGroups = WHOLE_KV,
        in_flight_tokens: int = 0,
    ) -> None:
        """``in_flight_tokens``: those of prompts that steps in flight compute at most, where groups have windows."""
        self.block_tokens = block_tokens
        self.groups = groups
        self._in_flight_tokens = in_flight_tokens
        self.num_blocks = num_blocks - groups.prompt_blocks(shared_tokens, block_tokens, in_flight_tokens=0)
        self.num_free = self.num_blocks
        self.num_taken = 0
        """Blocks taken since the start."""

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks of a prompt's own tokens while it is computed."""
        return self.groups.prompt_blocks(tokens, self.block_tokens, in_flight_tokens=self._in_flight_tokens)

    def exchange(self, num_blocks: int) -> None:
        """Take this many blocks, or give back as many as it is below zero."""
        if num_blocks < 0:
            self.give_back(-num_blocks)
        else:
            self.take(num_blocks)

    def settle(self, tokens: int) -> None:
        """Give back what a prompt of these tokens no longer needs when its decode begins."""
        self.give_back(self.blocks_of(tokens) - self.groups.running_blocks(tokens, self.block_tokens))

    def take(self, num_blocks: int) -> None:
        assert 0 <= num_blocks <= self.num_free, (num_blocks, self.num_free)
        self.num_free -= num_blocks
        self.num_taken += num_blocks

    def give_back(self, num_blocks: int) -> None:
        self.num_free += num_blocks
        assert self.num_free <= self.num_blocks, (self.num_free, self.num_blocks)


def waiting_prompts(workload: Workload) -> deque[Prompt]:
    """Return all requests as prompts, in order of arrival."""
    outputs = workload.output_tokens.tolist()
    own_tokens = (workload.prompt_tokens - workload.shared_prefix_tokens).tolist()
    return deque(
        Prompt(request=request, tokens=tokens, outputs=output)
        for request, (tokens, output) in enumerate(zip(own_tokens, outputs, strict=True))
    )


def require_fit(pool: BlockPool, prompts: deque[Prompt]) -> None:
    """Raise ``ValueError`` if the pool could never hold some request's KV."""
    longest = max(prompt.tokens + prompt.outputs for prompt in prompts)
    if pool.blocks_of(longest) > pool.num_blocks:
        raise ValueError(f"a request of {longest} tokens does not fit into {pool.num_blocks} KV blocks")


def add_prefill(
    work: StepWork, first_token: int, tokens: int, *, ends: bool, window_tokens: int | None = None
) -> None:
    """Add a prompt's tokens ``[first_token, first_token + tokens)`` to a step."""
    work.prefill_tokens += tokens
    work.prefill_pairs += prompt_pairs(first_token, tokens)
    if window_tokens is not None:
        work.prefill_window_pairs = work.prefill_window_pairs or 0.0
        work.prefill_window_pairs += window_pairs(first_token, tokens, window_tokens)
    work.prefill_outputs += ends
