"""The window over an engine that keeps its own room, as stock vLLM does: never starved, and bounded."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import pytest

from pipemax.config import EngineConfig
from pipemax.engine import EngineStats
from pipemax.generation import Completion, GenerationRequest, Sampling
from pipemax.serve.flow.credit import CreditWindow, StreamCredit
from pipemax.serve.flow.pacing import FLOOR_FACTOR, Pacer
from pipemax.serve.limits import WindowLimits
from pipemax.vllm_ext.engine.admission import AdmissionBook
from tests.fakes.idle_engine import IdleEngine

_STEP_S = 0.025
_STEP_TOKENS = 8_192
_PROMPT_TOKENS = 100
_MAX_TOKENS = 4_096
_KV_TOKENS = 1_600 * 200
"""KV of 1,600 rows with outputs of 100 tokens."""
_STREAMS = 4
_SLACK_ROWS = (_STREAMS + 1) * WindowLimits().chunk_rows
"""A chunk beyond what fits, and one that each stream has in any case."""


class StockEngine(IdleEngine):
    """A fake with vLLM's rules: requests run while their KV fits, and are preempted, the last first, when it does not.

    A request's id says how long its output becomes: ``NUMBER:TOKENS``.
    """

    def __init__(self, *, max_num_seqs: int) -> None:
        super().__init__()
        self._max_num_seqs = max_num_seqs
        self._book = AdmissionBook(2 * _KV_TOKENS, scheduler_reports=False)
        self._waiting: deque[str] = deque()
        self._running: list[str] = []
        self._outputs: dict[str, int] = {}
        """Output tokens in the host's memory, also of preempted requests."""
        self._kv_used = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def host_tokens(self) -> int:
        """Prompts and outputs of all requests that it holds."""
        return _PROMPT_TOKENS * (len(self._waiting) + len(self._running)) + sum(self._outputs.values())

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            most = request.sampling.max_tokens
            self._book.submit(request.request_id, prompt_tokens=_PROMPT_TOKENS, most_output_tokens=most)
            self._book.send(request.request_id)
            self._waiting.append(request.request_id)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Run one step."""
        self._admit()
        ended = []
        for request_id in self._running:
            self._outputs[request_id] += 1
            if self._outputs[request_id] == int(request_id.partition(":")[2]):
                ended.append(request_id)
        self._kv_used += len(self._running)
        return [self._end(request_id) for request_id in ended]

    def _admit(self) -> None:
        while self._kv_used + len(self._running) > _KV_TOKENS:
            last = self._running.pop()
            self._kv_used -= _PROMPT_TOKENS + self._outputs[last]
            self._waiting.appendleft(last)
        budget = _STEP_TOKENS
        while self._waiting and len(self._running) < self._max_num_seqs:
            size = _PROMPT_TOKENS + self._outputs.get(self._waiting[0], 0)
            if size > budget or self._kv_used + size + len(self._running) >= _KV_TOKENS:
                return
            budget -= size
            self._kv_used += size
            self._running.append(self._waiting.popleft())
            self._outputs.setdefault(self._running[-1], 0)

    def _end(self, request_id: str) -> Completion:
        output_tokens = self._outputs.pop(request_id)
        self._running.remove(request_id)
        self._kv_used -= _PROMPT_TOKENS + output_tokens
        self._book.learn([output_tokens])
        self._book.end([request_id])
        return Completion(
            request_id=request_id, prompt_tokens=_PROMPT_TOKENS, completion_tokens=output_tokens
        )

    def admission_credit_tokens(self) -> int:
        return self._book.credit_tokens()

    def stats(self) -> EngineStats:
        return EngineStats(metrics={"max_num_seqs": float(self._max_num_seqs)})


class Serving:
    """A window, its pacer, and streams that send all that they are granted."""

    def __init__(self, engine: StockEngine, output_tokens: Iterator[int]) -> None:
        self._engine = engine
        self._rows = enumerate(output_tokens)
        self._now_s = 0.0
        self._config = EngineConfig(model="any")
        self.window = CreditWindow(WindowLimits(), clock=lambda: self._now_s)
        self._pacer = Pacer(self.window, clock=lambda: self._now_s)
        self._streams = [self.window.open_stream() for _ in range(_STREAMS)]
        self._stream_of: dict[str, StreamCredit] = {}
        self.rows_left = True

    def step(self) -> None:
        """Feed the engine, and have it run one step."""
        self._pacer.resize(self._engine, self._config)
        for stream in self._streams:
            while self.rows_left and (grant := stream.grant()) is not None and grant.rows:
                self._send(stream, grant.rows)
        self._now_s += _STEP_S
        completions = self._engine.poll(0.0)
        for completion in completions:
            stream = self._stream_of.pop(completion.request_id)
            stream.finish(rows=1, size=1, output_size=1)
            stream.deliver(rows=1, output_size=1)
        self._pacer.learn(completions)

    def _send(self, stream: StreamCredit, most_rows: int) -> None:
        lengths = list(itertools.islice(self._rows, most_rows))
        self.rows_left = len(lengths) == most_rows
        stream.receive(rows=len(lengths), size=len(lengths))
        sampling = Sampling(max_tokens=_MAX_TOKENS)
        requests = [
            GenerationRequest(request_id=f"{number}:{tokens}", prompt="p", sampling=sampling)
            for number, tokens in lengths
        ]
        self._stream_of |= dict.fromkeys((request.request_id for request in requests), stream)
        self._engine.submit(requests)


def _spread(rows: int, mean: int) -> Iterator[int]:
    """Outputs from half to one and a half times the mean, in an order without a pattern."""
    return (mean // 2 + number * 7_919 % mean for number in range(rows))


@pytest.mark.parametrize("max_num_seqs", [256, 1_024, 1_600])
def test_a_tenth_of_max_num_seqs_always_waits_while_rows_are_left(max_num_seqs: int) -> None:
    engine = StockEngine(max_num_seqs=max_num_seqs)
    serving = Serving(engine, _spread(6_000, 100))
    least_waiting = max_num_seqs
    serving.step()
    while serving.rows_left:
        least_waiting = min(least_waiting, engine.num_waiting)
        serving.step()
    assert least_waiting >= max_num_seqs / 10


def test_the_host_s_memory_stays_bounded_where_long_outputs_come_after_short_ones() -> None:
    """Twice the KV in prompts at most, and outputs of ``max_num_seqs`` rows; once long ones end, no more come."""
    engine = StockEngine(max_num_seqs=1_024)
    serving = Serving(engine, itertools.chain(_spread(12_000, 20), itertools.repeat(1_000)))
    most_rows = most_tokens = 0
    for _ in range(2_500):
        serving.step()
        most_rows = max(most_rows, serving.window.running_rows)
        most_tokens = max(most_tokens, engine.host_tokens)
    bound_rows = 2 * _KV_TOKENS // _PROMPT_TOKENS + _SLACK_ROWS
    assert FLOOR_FACTOR * 1_024 < most_rows <= bound_rows
    assert most_tokens <= bound_rows * _PROMPT_TOKENS + 1_024 * 1_000
    assert engine.admission_credit_tokens() < -_KV_TOKENS
    assert serving.window.running_rows < most_rows
