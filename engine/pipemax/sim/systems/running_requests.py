"""Requests that decode together; simulating a step costs time only for the members that change.

Every member gains one token per step. So a member's end is a step number known when it joins, the step at which it
needs its next block follows from its length modulo the block size, and so does the step at which a layer with a window
no longer needs its oldest one. Used by every system that keeps its own batches (PipeMax's are the controller's).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipemax.domain.kv_groups import WHOLE_KV, KvGroups


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

    def __init__(
        self,
        block_tokens: int,
        shared_tokens: int,
        *,
        window_tokens: int | None = None,
        groups: KvGroups = WHOLE_KV,
    ) -> None:
        """``window_tokens``: to which layers with a window attend, whether or not ``groups`` free what is older."""
        self._block_tokens = block_tokens
        self._shared_tokens = shared_tokens
        self._window_tokens = window_tokens
        self._groups = groups
        self._steps = 0
        self._members: dict[int, Member] = {}
        self._ending: dict[int, set[int]] = {}
        self._phases = [0] * block_tokens  # members by (length − steps) mod block_tokens
        self._own_tokens = 0
        self._attending = _Beyond(max(0, (window_tokens or 0) - shared_tokens), block_tokens)
        self._freeing = _Beyond(groups.window_tokens, block_tokens)
        self._attended_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def context_tokens(self) -> int:
        """The KV tokens attended to in the next step."""
        return self._own_tokens + len(self._members) * self._shared_tokens

    @property
    def attended_in_windows(self) -> int | None:
        """Those of them to which layers with a window attend; None without such layers."""
        return None if self._window_tokens is None else self._attended_tokens

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
        self._count(member, 1)

    def leave(self, request: int) -> tuple[int, int]:
        """Remove a request; return its KV tokens now and its output tokens still to come."""
        member = self._members.pop(request)
        self._ending[member.last_step].discard(request)
        self._count(member, -1)
        return self._tokens_of(member), member.last_step - self._steps + 1

    def members(self) -> Iterator[tuple[int, int, int]]:
        """Yield each request, its KV tokens now and its output tokens still to come, oldest first."""
        for request, member in self._members.items():
            yield request, self._tokens_of(member), member.last_step - self._steps + 1

    def blocks_of(self, request: int) -> int:
        """Return the blocks that a request holds now."""
        return self._groups.running_blocks(self._tokens_of(self._members[request]), self._block_tokens)

    def new_blocks(self) -> int:
        """Return the blocks that the next step takes: for each member whose last block is full, one in each group.

        Those that leave a window before that are subtracted.
        """
        taken = self._groups.count * self._phases[-self._steps % self._block_tokens]
        if not self._groups.window:
            return taken
        # A member frees a block where its tokens, less the window and one, fill blocks.
        phase = (self._groups.window_tokens - 1 - self._steps) % self._block_tokens
        return taken - self._groups.window * self._freeing.phases[phase]

    def step(self) -> list[tuple[int, int]]:
        """Add a token to every member; remove and return those that end with it, as (request, blocks that it held)."""
        self._attended_tokens += len(self._members) - self._attending.count
        self._steps += 1
        self._own_tokens += len(self._members)
        self._attending.step(self._steps)
        self._freeing.step(self._steps)
        ended = []
        for request in sorted(self._ending.pop(self._steps - 1, ())):
            num_blocks = self.blocks_of(request)
            self._count(self._members.pop(request), -1)
            ended.append((request, num_blocks))
        return ended

    def _tokens_of(self, member: Member) -> int:
        return member.context_tokens + self._steps - member.joined_at

    def _count(self, member: Member, number: int) -> None:
        """Add or subtract one member, as it is now, in all sums."""
        tokens, offset = self._tokens_of(member), member.context_tokens - member.joined_at
        self._phases[offset % self._block_tokens] += number
        self._own_tokens += number * tokens
        if self._window_tokens is not None:
            self._attended_tokens += number * min(tokens + self._shared_tokens, self._window_tokens)
            self._attending.count_member(offset, self._steps, number)
        if self._groups.window:
            self._freeing.count_member(offset, self._steps, number)


class _Beyond:
    """Members that hold at least ``limit`` tokens, kept without looking at each in each step.

    A member's tokens are its offset and the number of steps.
    """

    def __init__(self, limit: int, block_tokens: int) -> None:
        self._limit = limit
        self._reaching: dict[int, int] = {}  # members by the step at which they reach the limit
        self.count = 0
        self.phases = [0] * block_tokens
        """Those beyond the limit, by offset mod block_tokens."""

    def count_member(self, offset: int, steps: int, number: int) -> None:
        """Add or subtract a member."""
        reaches_at = self._limit - offset
        if reaches_at > steps:
            self._reaching[reaches_at] = self._reaching.get(reaches_at, 0) + number
        else:
            self._move(offset, number)

    def step(self, steps: int) -> None:
        """Move the members that reach the limit with this step."""
        if number := self._reaching.pop(steps, 0):
            self._move(self._limit - steps, number)

    def _move(self, offset: int, number: int) -> None:
        self.count += number
        self.phases[offset % len(self.phases)] += number
