"""An engine that sends rows to an endpoint: ``pipemax.engine.Engine`` over ``Client``, with no model of its own.

One thread runs an event loop with all requests. ``Share`` decides which address takes the next one and how many are
open. A request that breaks is sent again, elsewhere if there is another address; it becomes its row's error only if it
breaks ``max_tries`` times while the address answers others.
"""

import asyncio
import contextlib
import logging
import queue
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from pipemax.answers.asks import Ask, Prompt, Reply
from pipemax.answers.book import RowBook
from pipemax.answers.row import Row, RowTools
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.domain.step_records import StepLimits, StepRecords, TuningFacts
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.client import Answered, Broken, Busy, Client, Outcome, RowRefused, RunRefused
from pipemax.endpoints.models import changed_models, listed_models
from pipemax.endpoints.replies import (
    EndpointThinking,
    UnreadableError,
    pooled_of,
    refusal_of,
    reply_of,
    spent_of,
)
from pipemax.endpoints.requests import Body, generation_body, pooling_body, row_fault
from pipemax.endpoints.share import AddressLimits, Share
from pipemax.engine import EngineStats
from pipemax.generation import Completion, GenerationRequest, RequestError, Spent
from pipemax.wire import ErrorCode, guarded

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_MODELS_PERIOD_S = 60.0
_WAITING_SHARE = 0.5
"""Rows that wait here beyond those that are open, as a share of them: an address that takes more at once finds them."""
_FEWEST_WAITING = 16
_START_S = 120.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Open:
    """An ask on its way."""

    ask: Ask
    row_id: str
    body: Body
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    tries: int = 0
    breaks: int = 0
    """Tries that broke while the address answered others."""
    avoid: set[int] = field(default_factory=set)
    task: "asyncio.Task[None] | None" = None


class EndpointEngine:
    """Implements ``pipemax.api.Engine`` over an endpoint."""

    def __init__(self, config: EndpointConfig) -> None:
        """Ask every address which models it serves. ``EngineStartError`` says why the engine cannot start."""
        self._config = config
        self._server = config.server or ServerFacts.model_validate({})
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
        self._rows = RowBook()
        thinking = None if config.reasoning_parser is None else EndpointThinking()
        self._tools = RowTools(encode=lambda request: Prompt((), request), thinking=thinking)
        self._completions: queue.SimpleQueue[list[Completion] | EngineDiedError] = queue.SimpleQueue()
        self._died: EngineDiedError | None = None
        # The loop's thread only:
        self._waiting: deque[_Open] = deque()
        self._open: dict[str, _Open] = {}  # by ask, waiting or sent
        self._spent: dict[str, Spent] = {}  # by row
        self._total = Spent()
        self._last_fault = ""
        self._pump_at: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()
        if (fault := self._started.get()) is not None:
            self._thread.join()
            raise fault

    # -- any thread -------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._call(self._submit, list(requests))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._call(self._abort, list(request_ids))

    def set_input_open(self, is_open: bool) -> None:
        """Nothing waits for more input."""

    def admission_credit_tokens(self) -> int:
        return 0  # ``wanted_rows`` says it in rows

    def most_limits(self) -> list[StepLimits]:
        return []

    def limits(self) -> list[StepLimits]:
        return []

    def set_limits(self, limits: Sequence[StepLimits]) -> None:
        if limits:
            raise ValueError("an endpoint has no limits of steps")

    def take_step_records(self) -> list[StepRecords]:
        return []

    def speculate(self, replicas: Collection[int]) -> None:
        raise ValueError("an endpoint has no replicas that could be started again with n-gram speculation")

    def tuning_facts(self) -> TuningFacts | None:
        return None

    def stats(self) -> EngineStats:
        share, total = self._share, self._total
        capacity = share.capacity
        wanted = capacity + max(_FEWEST_WAITING, int(_WAITING_SHARE * capacity))
        running = share.open_requests
        return EngineStats(
            phase="decode" if running else "idle",
            running_requests=running,
            waiting_requests=max(0, len(self._open) - running),
            metrics={
                "wanted_rows": wanted,
                "max_num_seqs": capacity,
                "endpoint_requests": total.requests,
                "endpoint_retries": total.retries,
                "endpoint_prompt_tokens": total.prompt_tokens,
                "endpoint_output_tokens": total.output_tokens,
                **{f"endpoint_{name}": value for name, value in share.figures().items()},
            },
        )

    def poll(self, timeout_s: float) -> list[Completion]:
        if self._died is not None:
            raise self._died
        ended: list[Completion] = []
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                wait_s = 0.0 if ended else max(0.0, deadline_s - time.monotonic())
                item = self._completions.get(timeout=wait_s) if wait_s else self._completions.get_nowait()
            except queue.Empty:
                return ended
            if isinstance(item, EngineDiedError):
                self._died = item
                if ended:
                    return ended
                raise item
            ended += item

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._stop.set)
            self._thread.join()

    def _call(self, work: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: the engine is closed or has died
            self._loop.call_soon_threadsafe(work, *arguments)

    # -- the loop's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # whatever ends this thread must reach the caller of poll
            log.exception("the endpoint's thread ended")
            self._completions.put(EngineDiedError(f"the engine died: {error!r}", suspects=frozenset()))
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        try:
            async with Client(self._config) as self._client:
                await self._check_models(at_start=True)
                self._started.put(None)
                watch = asyncio.create_task(self._watch())
                await self._stop.wait()
                tasks = [watch, *(one.task for one in self._open.values() if one.task is not None)]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except EngineStartError as error:
            self._started.put(error)

    async def _watch(self) -> None:
        """Look after the models that are served, and give up where nothing is answered."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            for note in self._share.take_notes():
                log.warning("%s", note)
            if self._open and self._share.silent_s > self._config.give_up_after_s:
                names = ", ".join(address.name for address in self._config.endpoint)
                self._die(
                    f"endpoint {names} has answered nothing for {self._share.silent_s:.0f} s (give_up_after_s); the "
                    f"last fault: {self._last_fault or 'none'}. Start the job again when it answers: rows that are "
                    "done are kept"
                )
            if time.monotonic() - looked_s >= _MODELS_PERIOD_S:
                looked_s = time.monotonic()
                try:
                    await self._check_models(at_start=False)
                except EngineStartError as error:
                    self._die(str(error))

    async def _check_models(self, *, at_start: bool) -> None:
        """Raise ``EngineStartError`` if an address serves another model than the check has found."""
        found = await asyncio.gather(
            *(
                listed_models(self._client, number, self._config)
                for number in range(len(self._config.endpoint))
            )
        )
        for address, outcome in zip(self._config.endpoint, found, strict=True):
            match outcome:
                case RunRefused(reason=reason):
                    raise EngineStartError(reason)
                case list() if fault := changed_models(outcome, self._server, self._config, address):
                    raise EngineStartError(fault)

    def _die(self, reason: str) -> None:
        if not self._stop.is_set():
            log.error("%s", reason)
            self._completions.put(EngineDiedError(reason, ends_run=True))
            self._stop.set()

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        ended = []
        for request in requests:
            if (fault := row_fault(request, self._config)) is not None:
                ended.append(Completion(request_id=request.request_id, error=fault))
                continue
            asks = self._first_asks(request)
            if isinstance(asks, Completion):
                ended.append(asks)
            else:
                ended += self._send(request.request_id, asks)
        if ended:
            self._completions.put(ended)
        self._pump()

    def _first_asks(self, request: GenerationRequest) -> list[Ask] | Completion:
        if self._config.is_pooling:
            return [Ask(ask_id=request.request_id, prompt=Prompt((), request), sampling=request.sampling)]
        return self._rows.open(request.request_id, Row(request, Prompt((), request), self._tools))

    def _send(self, row_id: str, asks: Sequence[Ask]) -> list[Completion]:
        """Queue asks. Return the row's error if they cannot be written."""
        for ask in asks:
            body = guarded(self._body, ask, ErrorCode.INVALID_PROMPT)
            if isinstance(body, RequestError):
                self._forget(self._rows.abort([row_id]))
                return [self._paid(Completion(request_id=row_id, error=body))]
            one = _Open(ask=ask, row_id=row_id, body=body)
            self._open[ask.ask_id] = one
            self._waiting.append(one)
        return []

    def _body(self, ask: Ask) -> Body:
        if self._config.is_pooling:
            return pooling_body(ask.prompt.media, self._config)
        return generation_body(ask, self._config, self._server)

    def _abort(self, request_ids: Sequence[str]) -> None:
        asks = request_ids if self._config.is_pooling else self._rows.abort(request_ids)
        self._forget(asks)
        for row_id in request_ids:
            self._spent.pop(row_id, None)

    def _forget(self, asks: Collection[str]) -> None:
        for ask_id in asks:
            one = self._open.pop(ask_id, None)
            if one is not None and one.task is not None:
                one.task.cancel()

    def _pump(self) -> None:
        """Send what the addresses take now."""
        if self._pump_at is not None:
            self._pump_at.cancel()
            self._pump_at = None
        while self._waiting and not self._stop.is_set():
            one = self._waiting[0]
            if one.ask.ask_id not in self._open:  # it was aborted
                self._waiting.popleft()
                continue
            address = self._share.take(one.body.tokens, avoid=frozenset(one.avoid))
            if address is None:
                self._pump_at = self._loop.call_later(max(0.01, self._share.wait_s()), self._pump)
                return
            self._waiting.popleft()
            one.task = self._loop.create_task(self._ask(one, address))

    async def _ask(self, one: _Open, address: int) -> None:
        began_s, tokens = time.monotonic(), one.body.tokens
        one.tries += 1
        self._pay(one.row_id, Spent(requests=1, retries=int(one.tries > 1)))
        try:
            outcome = await self._client.post(
                address, self._url(address, one.body), one.body.values, key=one.key
            )
        except asyncio.CancelledError:
            self._share.released(address, tokens_estimated=tokens)
            raise
        one.task = None
        self._take(one, address, began_s, self._read(one, outcome))
        self._pump()

    def _url(self, address: int, body: Body) -> str:
        place = self._config.endpoint[address]
        return place.server_url_of(body.path) if body.is_beside else place.url_of(body.path)

    def _read(self, one: _Open, outcome: Outcome) -> Outcome | tuple[Answered, Reply | Completion]:
        """Return an answer with what it says, or as broken if it cannot be read."""
        if not isinstance(outcome, Answered):
            return outcome
        try:
            if self._config.is_pooling:
                return outcome, pooled_of(outcome.values, one.row_id, self._config.task)
            return outcome, reply_of(outcome.values, one.ask.sampling, self._config, self._server)
        except (UnreadableError, AttributeError, KeyError, TypeError, ValueError) as error:
            return Broken(reason=f"its answer cannot be read: {self._client.without_keys(str(error))}")

    def _take(
        self, one: _Open, address: int, began_s: float, outcome: Outcome | tuple[Answered, Reply | Completion]
    ) -> None:
        share, tokens = self._share, one.body.tokens
        match outcome:
            case Answered() as answered, reply:
                spent = spent_of(answered.values)
                used = spent.prompt_tokens + spent.output_tokens
                share.answered(address, latency_s=answered.latency_s, tokens_estimated=tokens, tokens=used)
                self._pay(one.row_id, spent)
                self._check_answerer(answered.values, address)
                self._end(one, reply)
            case RowRefused(status=status, text=text):
                share.refused(address, tokens_estimated=tokens)
                self._end(one, Reply(error=refusal_of(status, text)))
            case Busy(retry_after_s=pause_s, reason=reason):
                self._last_fault = reason
                share.throttled(address, tokens_estimated=tokens, retry_after_s=pause_s)
                self._again(one, 0.0)
            case Broken(reason=reason, is_timeout=is_timeout):
                self._last_fault = reason
                share.broken(address, reason=reason, tokens_estimated=tokens, is_timeout=is_timeout)
                one.avoid.add(address)
                one.breaks += share.answered_others_since(address, began_s)
                if one.breaks >= self._config.max_tries:
                    self._end(one, Reply(error=self._failed(one, reason)))
                else:
                    self._again(one, _pause_s(one.tries))
            case RunRefused(reason=reason):
                share.released(address, tokens_estimated=tokens)
                self._die(reason)

    def _failed(self, one: _Open, reason: str) -> RequestError:
        return RequestError(
            code=ErrorCode.ENGINE_ERROR,
            message=f"the endpoint failed this row {one.breaks} times while it answered others; at last: {reason}",
        )

    def _again(self, one: _Open, pause_s: float) -> None:
        """Queue an ask again, before those that have not been sent."""
        if pause_s:
            self._loop.call_later(pause_s, self._requeue, one)
        else:
            self._requeue(one)

    def _requeue(self, one: _Open) -> None:
        if one.ask.ask_id in self._open:
            self._waiting.appendleft(one)
            self._pump()

    def _check_answerer(self, values: object, address: int) -> None:
        """End the run if another model answers than the check has found."""
        expected = self._server.answers_as
        named = values.get("model") if isinstance(values, dict) else None
        if expected is not None and isinstance(named, str) and named != expected:
            self._die(
                f"endpoint {self._config.endpoint[address].name} answered as model {named!r}, and the run began with "
                f"{expected!r}: rows of one spec must come from one model. Start the job again with another "
                "model_revision if the new one is meant"
            )

    def _end(self, one: _Open, reply: Reply | Completion) -> None:
        self._open.pop(one.ask.ask_id, None)
        if self._config.is_pooling:
            if isinstance(reply, Reply):
                reply = Completion(request_id=one.row_id, error=reply.error)
            self._completions.put([self._paid(reply)])
            return
        assert isinstance(reply, Reply)
        asks, ended = self._rows.take(one.ask.ask_id, reply)
        completions = self._send(one.row_id, asks)
        if ended is not None:
            completions.append(self._paid(ended))
        if completions:
            self._completions.put(completions)

    def _pay(self, row_id: str, spent: Spent) -> None:
        self._spent[row_id] = self._spent.get(row_id, Spent()) + spent
        self._total += spent

    def _paid(self, completion: Completion) -> Completion:
        return replace(completion, spent=self._spent.pop(completion.request_id, Spent()))


def _part(limit: float | None, executors: int) -> float | None:
    return None if limit is None else limit / executors


def _pause_s(tries: int) -> float:
    """Return how long a request waits before its next try: exponential, with jitter over the upper half."""
    longest_s: float = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 16))
    return longest_s * (0.5 + 0.5 * random.random())
