"""Track whose state the workers keep, by the slots that vLLM's V2 model runner has for it.

A slot holds a request's tokens, sampling state and block table. Requests that left the GPU keep their slots while free
ones remain, so that after a prefetch only the block table is overwritten. Beyond that, the request that has been away
longest gives up its slot, and is sent like a new request, with its tokens. The V1 runner has no such limit.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from pipemax.vllm_ext.seam.vllm_types import NewRequestData, Request

UNLIMITED = 1 << 30
"""Number of slots of a runner that keeps the state of every request, by its id."""


class RunnerSlots:
    """The scheduler's view of the slots: who has one. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._on_gpu: set[str] = set()
        self._away: OrderedDict[str, None] = OrderedDict()  # without KV on the GPU; the longest away first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._on_gpu or request_id in self._away

    def __len__(self) -> int:
        return len(self._on_gpu) + len(self._away)

    def take(self, request_ids: Iterable[str]) -> list[str]:
        """Give each of a step's requests a slot. Return the requests that gave up theirs.

        At most ``num_slots`` requests may have KV on the GPU, so that there are always enough away.
        """
        new = {*request_ids} - self._on_gpu  # most of hundreds are there already
        for request_id in new:
            self._away.pop(request_id, None)
        self._on_gpu |= new
        excess = len(self) - self.num_slots
        assert excess <= len(self._away), (
            f"{len(self._on_gpu)} requests on the GPU, {self.num_slots} slots of the runner"
        )
        return [self._away.popitem(last=False)[0] for _ in range(excess)]

    def lacking(self, request_ids: Iterable[str]) -> set[str]:
        """Return those of these requests that have no slot."""
        return {request_id for request_id in {*request_ids} - self._on_gpu if request_id not in self._away}

    def leave_gpu(self, request_id: str) -> None:
        """Note that the request's KV is only on the host; it keeps any slot until another request needs it."""
        if request_id in self._on_gpu:
            self._on_gpu.remove(request_id)
            self._away[request_id] = None

    def note_prefetch(self, request_id: str) -> None:
        """Note that the request's KV is prefetched: it may keep its slot, if it still has one."""
        if request_id in self._away:
            del self._away[request_id]
            self._on_gpu.add(request_id)

    def release(self, request_id: str) -> None:
        """Free any slot of the request, which the workers forget."""
        self._on_gpu.discard(request_id)
        self._away.pop(request_id, None)


class News(NamedTuple):
    """A step's requests that ran before, by what the workers have to hear of them."""

    known: list[Request]
    """Requests of which the workers know all but the new blocks."""
    moved: list[Request]
    """Requests prefetched to other GPU blocks: their block tables are replaced."""
    resent: list[Request]
    """Requests that lost their slots meanwhile: sent with their tokens so far."""
    dropped: list[str]
    """Requests that give up their slots."""


class WorkerState:
    """Tracks what the workers know of each request that has started. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self.slots = RunnerSlots(num_slots)
        self._prefetched: set[str] = set()  # to other blocks, and not run since
        self._tokens: dict[str, array[int]] = {}  # when last resent, by request

    def leave_gpu(self, request_id: str) -> None:
        self.slots.leave_gpu(request_id)
        self._prefetched.discard(request_id)

    def note_prefetch(self, request_id: str) -> None:
        self.slots.note_prefetch(request_id)
        self._prefetched.add(request_id)

    def release(self, request_id: str) -> None:
        """Forget the request, as the workers do or are about to."""
        self.slots.release(request_id)
        self._prefetched.discard(request_id)
        self._tokens.pop(request_id, None)

    def news(self, started: Sequence[Request], scheduled: Iterable[str]) -> News:
        """Decide what the workers hear of a step of ``scheduled``, of which ``started`` ran before."""
        news, prefetched = News([], [], [], []), self._prefetched
        ids = [request.request_id for request in started]
        changed = prefetched.intersection(ids) | self.slots.lacking(ids)  # few of hundreds
        for request, request_id in zip(started, ids, strict=True):
            if request_id not in changed:
                news.known.append(request)
            elif request_id not in self.slots:
                news.resent.append(request)
            else:
                news.moved.append(request)
        prefetched.difference_update(scheduled)
        news.dropped.extend(self.slots.take(scheduled))
        return news

    def resend(self, request: Request, block_ids: tuple[list[int], ...]) -> NewRequestData:
        """Return the message for the workers of a request that lost its slot: like a new one, with its tokens so far.

        The tokens are an array, which is pickled by copying; a list would be encoded token by token. The V2 runner
        iterates over them. Of the prompt, which begins them, it asks for no more than the length, which is all that a
        range is. A request may be sent with each prefetch, so its array is kept, and grows by what was generated since.
        """
        tokens = self._tokens.setdefault(request.request_id, array("i"))
        tokens.extend(request.all_token_ids[len(tokens) :])
        message = NewRequestData.from_request(request, block_ids, cast("list[int]", tokens[:]))
        message.prompt_token_ids = cast("list[int]", range(request.num_prompt_tokens))
        return message
