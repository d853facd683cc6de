"""Send requests to an endpoint's addresses until each has an answer or a reason why it has none.

``Share`` decides which address takes the next request and how many are open. A request that breaks is sent again, to
another address if there is one. It fails only if it breaks ``max_tries`` times while the address answers others; where
there are no others, a request of two tokens takes their place. Runs on one event loop.
"""

import asyncio
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.client import Answered, Broken, Busy, Client, Outcome, RowRefused, RunRefused
from pipemax.endpoints.models import ModelWatch
from pipemax.endpoints.replies import UnreadableError, refusal_of, spent_of
from pipemax.endpoints.requests import Body, control_body
from pipemax.endpoints.share import AddressLimits, Share
from pipemax.generation import RequestError, Spent
from pipemax.wire import ErrorCode

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_MODELS_PERIOD_S = 60.0
_LOOK_PERIOD_S = 1.0
_CONTROL = "control"
"""The name under which ``spend`` hears of requests that are no row's."""

Read = Callable[[Any], Any]
"""Makes a result of an answer's JSON; ``UnreadableError`` and the errors of wrong types mean that it is none."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """A request until its end."""

    name: str
    body: Body
    read: Read
    ended: Callable[[Any], None]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    tries: int = 0
    faults: int = 0
    """Tries that broke."""
    breaks: int = 0
    """Tries that broke while the address answered others."""
    avoid: set[int] = field(default_factory=set)
    task: "asyncio.Task[None] | None" = None


class Sender:
    """Requests by name, each of which ends once: with what ``read`` makes of the answer, or a ``RequestError``."""

    def __init__(
        self,
        config: EndpointConfig,
        server: ServerFacts,
        client: Client,
        *,
        spend: Callable[[str, Spent], None],
        die: Callable[[str], None],
    ) -> None:
        """``spend`` hears what a request cost; ``die`` is called, perhaps repeatedly, when the run cannot go on."""
        self._config = config
        self._server = server
        self._client = client
        self._spend = spend
        self._die = die
        self._models = ModelWatch(client, config, server)
        self._share = Share(
            [
                AddressLimits(
                    name=address.name,
                    max_concurrency=config.concurrency_of_address,
                    requests_per_minute=_part(config.max_requests_per_minute, config.executors),
                    tokens_per_minute=_part(config.max_tokens_per_minute, config.executors),
                )
                for address in config.endpoint
            ]
        )
        self._requests: dict[str, _Request] = {}
        # Those that have been sent before go first, and hold up no others while the address that they avoid has room.
        self._queues: tuple[deque[_Request], deque[_Request]] = (deque(), deque())
        self._controls: dict[int, asyncio.Task[bool]] = {}  # by address
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump_at: asyncio.TimerHandle | None = None
        self._last_fault = "none"
        self._is_closed = False

    @property
    def share(self) -> Share:
        """How much the addresses take."""
        return self._share

    @property
    def num_requests(self) -> int:
        """The requests that have not ended."""
        return len(self._requests)

    async def start_fault(self) -> str | None:
        """Return why no run can begin: an address refuses it, or serves another model than the check has found."""
        return await self._models.fault()

    def send(self, name: str, body: Body, *, read: Read, ended: Callable[[Any], None]) -> None:
        """Begin a request. Call ``pump`` after the last one."""
        request = _Request(name=name, body=body, read=read, ended=ended)
        self._requests[name] = request
        self._queues[1].append(request)

    def forget(self, names: Collection[str]) -> None:
        """Drop requests. Unknown names are ignored."""
        for name in names:
            request = self._requests.pop(name, None)
            if request is not None and request.task is not None:
                request.task.cancel()

    def pump(self) -> None:
        """Send what the addresses take now."""
        if self._pump_at is not None:
            self._pump_at.cancel()
            self._pump_at = None
        while not self._is_closed and (taken := self._next()) is not None:
            request, address = taken
            request.task = asyncio.get_running_loop().create_task(self._try(request, address))
        if any(self._queues) and not self._is_closed:
            self._pump_at = asyncio.get_running_loop().call_later(max(0.01, self._share.wait_s()), self.pump)

    async def watch(self) -> None:
        """Look after the models that are served, and give up where nothing is answered. Ends when it is cancelled."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_PERIOD_S)
            for note in self._share.take_notes():
                log.warning("%s", note)
            if self._requests and self._share.silent_s > self._config.give_up_after_s:
                names = ", ".join(address.name for address in self._config.endpoint)
                self._die(
                    f"endpoint {names} has answered nothing for {self._share.silent_s:.0f} s (give_up_after_s); the "
                    f"last fault: {self._last_fault}. Start the job again when it answers: rows that are done are kept"
                )
            if time.monotonic() - looked_s >= _MODELS_PERIOD_S:
                looked_s = time.monotonic()
                if (fault := await self._models.fault()) is not None:
                    self._die(fault)

    async def close(self) -> None:
        """Drop all requests, and wait until nothing of them runs."""
        self._is_closed = True
        tasks = [*self._tasks, *self._controls.values()]
        tasks += [request.task for request in self._requests.values() if request.task is not None]
        self._requests.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _next(self) -> tuple[_Request, int] | None:
        """Return a request that an address takes now, with that address."""
        for queue in self._queues:
            while queue and self._requests.get(queue[0].name) is not queue[0]:
                queue.popleft()  # it was dropped
            if queue:
                address = self._share.take(queue[0].body.tokens, avoid=frozenset(queue[0].avoid))
                if address is not None:
                    return queue.popleft(), address
        return None

    async def _try(self, request: _Request, address: int) -> None:
        began_s, tokens = time.monotonic(), request.body.tokens
        request.tries += 1
        self._spend(request.name, Spent(requests=1, retries=int(request.tries > 1)))
        try:
            outcome = await self._post(address, request.body, request.key)
        except asyncio.CancelledError:
            self._share.released(address, tokens_estimated=tokens)
            raise
        request.task = None
        result: Any = None
        if isinstance(outcome, Answered):
            try:
                result = request.read(outcome.values)
            except (UnreadableError, AttributeError, KeyError, TypeError, ValueError) as error:
                outcome = Broken(reason=f"its answer cannot be read: {self._client.without_keys(str(error))}")
        self._take(request, address, began_s, outcome, result)
        self.pump()

    async def _post(self, address: int, body: Body, key: str | None = None) -> Outcome:
        place = self._config.endpoint[address]
        url = place.server_url_of(body.path) if body.is_beside else place.url_of(body.path)
        return await self._client.post(address, url, body.values, key=key)

    def _take(self, request: _Request, address: int, began_s: float, outcome: Outcome, result: Any) -> None:
        share, tokens = self._share, request.body.tokens
        match outcome:
            case Answered(values=values, latency_s=latency_s):
                spent = spent_of(values)
                used = spent.prompt_tokens + spent.output_tokens
                share.answered(address, latency_s=latency_s, tokens_estimated=tokens, tokens=used)
                self._spend(request.name, spent)
                if (fault := self._models.fault_of_answer(values, address)) is not None:
                    self._die(fault)
                else:
                    self._end(request, result)
            case RowRefused(status=status, text=text):
                share.refused(address, tokens_estimated=tokens)
                self._end(request, refusal_of(status, text))
            case Busy(retry_after_s=pause_s, reason=reason):
                self._last_fault = reason
                share.throttled(address, tokens_estimated=tokens, retry_after_s=pause_s)
                self._queue_again(request)
            case Broken(reason=reason, is_timeout=is_timeout):
                self._last_fault = reason
                request.faults += 1
                share.broken(
                    address, reason=reason, tokens_estimated=tokens, is_timeout=is_timeout, began_s=began_s
                )
                request.avoid.add(address)
                if share.answered_others_since(address, began_s):
                    self._break(request, reason)
                else:
                    self._begin(self._doubt(request, address, reason))
            case RunRefused(reason=reason):
                share.released(address, tokens_estimated=tokens)
                self._die(reason)

    def _end(self, request: _Request, result: Any) -> None:
        if self._requests.get(request.name) is request:
            del self._requests[request.name]
            request.ended(result)

    # What has broken.

    async def _doubt(self, request: _Request, address: int, reason: str) -> None:
        """Find out whether the request or the address is at fault, where nothing else was answered meanwhile."""
        if address not in self._controls:
            self._controls[address] = asyncio.get_running_loop().create_task(self._control(address))
        if await self._controls[address]:
            self._break(request, reason)
        else:
            self._queue_later(request)

    async def _control(self, address: int) -> bool:
        """Return whether the address answers the shortest request."""
        try:
            self._spend(_CONTROL, Spent(requests=1))
            outcome = await self._post(address, control_body(self._config, self._server))
            if isinstance(outcome, Answered):
                self._spend(_CONTROL, spent_of(outcome.values))
            if is_alive := isinstance(outcome, Answered | RowRefused):
                self._share.lives(address)
            elif isinstance(outcome, Busy):
                self._share.is_reached(address)
            return is_alive
        finally:
            del self._controls[address]

    def _break(self, request: _Request, reason: str) -> None:
        """Count a try that broke while the address answers others."""
        request.breaks += 1
        if request.breaks < self._config.max_tries:
            self._queue_later(request)
            return
        message = (
            f"the endpoint failed this row {request.breaks} times while it answered others; at last: {reason}"
        )
        self._end(request, RequestError(code=ErrorCode.ENGINE_ERROR, message=message))

    def _queue_later(self, request: _Request) -> None:
        async def wait() -> None:
            await asyncio.sleep(_pause_s(request.faults))
            self._queue_again(request)
            self.pump()

        self._begin(wait())

    def _queue_again(self, request: _Request) -> None:
        self._queues[0].append(request)

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _part(limit: float | None, executors: int) -> float | None:
    return None if limit is None else limit / executors


def _pause_s(faults: int) -> float:
    """Return how long a request waits before its next try: exponential, with jitter over the upper half."""
    longest_s: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(faults - 1, 16))
    return longest_s * (0.5 + 0.5 * random.random())
