"""Requests that decode together; simulating a step costs time only for the members that change.

Every member gains one token per step. So a member's end is a step number known when it joins, and the step at which
it needs its next block follows from its length modulo the block size. Used by every system that keeps its own
batches (PipeMax's are the controller's).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipemax.domain.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A request as it was when it joined."""

    context_tokens: int
    """KV tokens it holds, without the prefix that all share."""
    joined_at: int
    """Steps that the set had made by then."""
    last_step: int
    """The step that yields its last token."""


class RunningSet:
    """The members of a batch. ``shared_tokens`` is the length of a prefix whose blocks all members share."""

    def __init__(self, block_tokens: int, shared_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._shared_tokens = shared_tokens
        self._steps = 0
        self._members: dict[int, Member] = {}
        self._ending: dict[int, set[int]] = {}
        self._phases = [0] * block_tokens  # members by (length − steps) mod block_tokens
        self._own_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def context_tokens(self) -> int:
        """The KV tokens attended to in the next step."""
        return self._own_tokens + len(self._members) * self._shared_tokens

    @property
    def newest(self) -> int:
        """The request that joined last."""
        return next(reversed(self._members))

    def join(self, request: int, context_tokens: int, output_tokens: int) -> None:
        """Add a request of which ``output_tokens`` are still to come, at least one."""
        assert output_tokens >= 1, (request, output_tokens)
        last_step = self._steps + output_tokens - 1
        member = Member(context_tokens=context_tokens, joined_at=self._steps, last_step=last_step)
        self._members[request] = member
        self._ending.setdefault(last_step, set()).add(request)
        self._phases[(context_tokens - self._steps) % self._block_tokens] += 1
        self._own_tokens += context_tokens

    def leave(self, request: int) -> tuple[int, int]:
        """Remove a request; return its KV tokens now and its output tokens still to come."""
        member = self._members.pop(request)
        self._ending[member.last_step].discard(request)
        context_tokens = member.context_tokens + self._steps - member.joined_at
        self._phases[(member.context_tokens - member.joined_at) % self._block_tokens] -= 1
        self._own_tokens -= context_tokens
        return context_tokens, member.last_step - self._steps + 1

    def members(self) -> Iterator[tuple[int, int, int]]:
        """Yield each request, its KV tokens now and its output tokens still to come, oldest first."""
        for request, member in self._members.items():
            yield (
                request,
                member.context_tokens + self._steps - member.joined_at,
                member.last_step - self._steps + 1,
            )

    def blocks_of(self, request: int) -> int:
        member = self._members[request]
        return ceil_div(member.context_tokens + self._steps - member.joined_at, self._block_tokens)

    def new_blocks(self) -> int:
        """Return the blocks that the next step takes: one for each member whose last block is full."""
        return self._phases[-self._steps % self._block_tokens]

    def step(self) -> list[tuple[int, int]]:
        """Add a token to every member; remove and return those that end with it, as (request, blocks that it held)."""
        self._steps += 1
        self._own_tokens += len(self._members)
        ended = []
        for request in sorted(self._ending.pop(self._steps - 1, ())):
            member = self._members.pop(request)
            context_tokens = member.context_tokens + self._steps - member.joined_at
            self._phases[(member.context_tokens - member.joined_at) % self._block_tokens] -= 1
            self._own_tokens -= context_tokens
            ended.append((request, ceil_div(context_tokens, self._block_tokens)))
        return ended
