"""An engine that sends rows to an endpoint: ``pipemax.engine.Engine`` over ``Sender``, with no model of its own.

One thread runs an event loop with all requests; other threads only leave work for it and take what has ended.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pipemax.answers.asks import Ask, Prompt, Reply
from pipemax.answers.book import RowBook
from pipemax.answers.row import Row, RowTools
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.domain.step_records import StepLimits, StepRecords, TuningFacts
from pipemax.endpoint_config import EndpointConfig, ServerFacts
from pipemax.endpoints.client import Client
from pipemax.endpoints.replies import EndpointThinking, pooled_of, reply_of
from pipemax.endpoints.requests import generation_body, pooling_body, row_fault
from pipemax.endpoints.sender import Sender
from pipemax.engine import EngineStats
from pipemax.generation import Completion, GenerationRequest, RequestError, Spent
from pipemax.wire import ErrorCode, guarded

log = logging.getLogger(__name__)

_WAITING_SHARE = 0.5
"""Rows that wait here beyond those that are open, as a share of them: an address that takes more at once finds them."""
_FEWEST_WAITING = 16
_STATS_PERIOD_S = 0.02
_STOPPED = RequestError(code=ErrorCode.ENGINE_ERROR, message="the row was stopped")


class EndpointEngine:
    """Implements ``pipemax.api.Engine`` over an endpoint."""

    def __init__(self, config: EndpointConfig) -> None:
        """Ask every address which models it serves. ``EngineStartError`` says why the engine cannot start."""
        self._config = config
        self._server = config.server or ServerFacts.model_validate({})
        self._rows = RowBook()
        thinking = None if config.reasoning_parser is None else EndpointThinking()
        self._tools = RowTools(encode=lambda request: Prompt((), request), thinking=thinking)
        self._completions: queue.SimpleQueue[list[Completion] | EngineDiedError] = queue.SimpleQueue()
        self._died: EngineDiedError | None = None
        self._stats = EngineStats()
        # The loop's thread only:
        self._sender: Sender
        self._spent: dict[str, Spent] = {}  # by row
        self._total = Spent()
        self._counted_s = float("-inf")
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: queue.SimpleQueue[EngineStartError | None] = queue.SimpleQueue()
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
        self._call(self._count)  # for the next call
        return self._stats

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
        self._call(self._stop.set)
        self._thread.join()

    def _call(self, work: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: the engine is closed or has died
            self._loop.call_soon_threadsafe(work, *arguments)

    # -- the loop's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except EngineStartError as error:
            self._started.put(error)
        except Exception as error:  # whatever ends this thread must reach whoever waits for it
            log.exception("the endpoint's thread ended")
            self._started.put(EngineStartError(f"the endpoint's engine did not start: {error!r}"))
            self._completions.put(EngineDiedError(f"the engine died: {error!r}", suspects=frozenset()))
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        async with Client(self._config) as client:
            self._sender = Sender(self._config, self._server, client, spend=self._spend, die=self._die)
            if (fault := await self._sender.start_fault()) is not None:
                raise EngineStartError(fault)
            self._count()
            self._started.put(None)
            watch = self._loop.create_task(self._sender.watch())
            await self._stop.wait()
            watch.cancel()
            await asyncio.gather(watch, self._sender.close(), return_exceptions=True)

    def _die(self, reason: str) -> None:
        if not self._stop.is_set():
            log.error("%s", reason)
            self._completions.put(EngineDiedError(reason, ends_run=True))
            self._stop.set()

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if (fault := row_fault(request, self._config)) is not None:
                self._hand_out(Completion(request_id=request.request_id, error=fault))
            elif self._config.is_pooling:
                self._send_pooling(request)
            else:
                asks = self._rows.open(request.request_id, Row(request, Prompt((), request), self._tools))
                if isinstance(asks, Completion):
                    self._hand_out(asks)
                else:
                    self._send(request.request_id, asks)
        self._sender.pump()
        self._count()

    def _send(self, row_id: str, asks: Sequence[Ask]) -> None:
        for ask in asks:
            body = guarded(
                lambda one: generation_body(one, self._config, self._server), ask, ErrorCode.INVALID_PROMPT
            )
            if isinstance(body, RequestError):
                self._sender.forget(self._rows.abort([row_id]))
                self._hand_out(Completion(request_id=row_id, error=body))
                return
            read = partial(reply_of, sampling=ask.sampling, config=self._config, server=self._server)
            self._sender.send(ask.ask_id, body, read=read, ended=partial(self._end, row_id, ask.ask_id))

    def _send_pooling(self, request: GenerationRequest) -> None:
        row_id, task = request.request_id, self._config.task
        body = guarded(lambda one: pooling_body(one, self._config), request, ErrorCode.INVALID_PROMPT)
        if isinstance(body, RequestError):
            self._hand_out(Completion(request_id=row_id, error=body))
            return
        read = partial(pooled_of, request_id=row_id, task=task)
        self._sender.send(row_id, body, read=read, ended=partial(self._end_pooling, row_id))

    def _end(self, row_id: str, ask_id: str, result: Reply | RequestError) -> None:
        reply = Reply(error=result) if isinstance(result, RequestError) else result
        asks, completion = self._rows.take(ask_id, reply)
        self._send(row_id, asks)
        if completion is not None:
            self._hand_out(completion)

    def _end_pooling(self, row_id: str, result: Completion | RequestError) -> None:
        if isinstance(result, RequestError):
            result = Completion(request_id=row_id, error=result)
        self._hand_out(result)

    def _hand_out(self, completion: Completion) -> None:
        spent = self._spent.pop(completion.request_id, Spent())
        self._completions.put([replace(completion, spent=spent)])
        self._count()

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._sender.forget(request_ids if self._config.is_pooling else self._rows.abort(request_ids))
        for row_id in request_ids:
            if row_id in self._spent:  # nobody waits for the row, and what was asked for it is billed
                self._hand_out(Completion(request_id=row_id, error=_STOPPED))
        self._sender.pump()

    def _spend(self, name: str, spent: Spent) -> None:
        row_id = name.partition(" ask ")[0]  # asks beyond a row's first have its id and a number
        self._spent[row_id] = self._spent.get(row_id, Spent()) + spent
        self._total += spent

    def _count(self) -> None:
        """Take the figures that other threads ask for, not too often."""
        now_s = time.monotonic()
        if now_s - self._counted_s < _STATS_PERIOD_S:
            return
        self._counted_s = now_s
        share, total = self._sender.share, self._total
        capacity, running = share.capacity, share.open_requests
        metrics: dict[str, Any] = {
            "wanted_rows": capacity + max(_FEWEST_WAITING, int(_WAITING_SHARE * capacity)),
            "max_num_seqs": capacity,
            "endpoint_requests": total.requests,
            "endpoint_retries": total.retries,
            "endpoint_prompt_tokens": total.prompt_tokens,
            "endpoint_output_tokens": total.output_tokens,
            **{f"endpoint_{name}": value for name, value in share.figures().items()},
        }
        self._stats = EngineStats(
            phase="decode" if running else "idle",
            running_requests=running,
            waiting_requests=max(0, self._sender.num_requests - running),
            metrics=metrics,
        )
