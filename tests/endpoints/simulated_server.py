"""A server of a model in simulated time, and a client that sends it whatever ``Share`` allows.

The server decodes up to ``slots`` rows at once, each by one token per step; a step takes ``step_s(rows)``. Other
requests wait in its queue, or are refused with 429 if more than ``bears`` are open. A request that the client gives up
after ``timeout_s`` leaves the server. Lengths are lognormal.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pipemax.endpoints.share import AddressLimits, Share

MEAN_TOKENS = 200
PROMPT_TOKENS = 20
REFUSAL_S = 0.002


@dataclass(slots=True, eq=False)
class Request:
    sent_s: float
    tokens: int
    """Of its output."""
    is_over: bool = False

    @property
    def known_tokens(self) -> int:
        """What the client knows of prompt and output."""
        return (self.tokens if self.is_over else MEAN_TOKENS) + PROMPT_TOKENS


@dataclass(kw_only=True)
class Server:
    """At a time in s, so many slots, and so many open requests before it refuses."""

    slots: Callable[[float], int]
    step_s: Callable[[int], float]
    bears: Callable[[float], float] = lambda now_s: math.inf
    retry_after_s: float | None = None
    sporadic: float = 0.0
    """The share of requests that it refuses whatever is open."""
    timeout_s: float = math.inf
    _progress: float = 0.0  # tokens that a row which always ran would have
    _now_s: float = 0.0
    _running: list[tuple[float, int, Request]] = field(default_factory=list)  # by the progress at its end
    _queue: deque[Request] = field(default_factory=deque)
    _sent: deque[Request] = field(default_factory=deque)  # the oldest first
    _count: int = 0

    @property
    def num_open(self) -> int:
        return len(self._running) + len(self._queue)

    def advance(self, now_s: float) -> None:
        if self._running:
            self._progress += (now_s - self._now_s) / self.step_s(len(self._running))
        self._now_s = now_s

    def next_s(self) -> float:
        """When the next row ends or is given up if none comes."""
        while self._sent and self._sent[0].is_over:
            self._sent.popleft()
        late_s = self._sent[0].sent_s + self.timeout_s if self._sent else math.inf
        if not self._running:
            return late_s
        steps = max(0.0, self._running[0][0] - self._progress)
        return min(late_s, self._now_s + steps * self.step_s(len(self._running)))

    def add(self, request: Request) -> None:
        self._queue.append(request)
        self._sent.append(request)
        self._fill()

    def end_one(self) -> Request:
        """Remove the row that ends at ``next_s``; it was given up if that long has passed since it was sent."""
        if self._now_s >= self._sent[0].sent_s + self.timeout_s:
            request = self._sent.popleft()
            if request in self._queue:
                self._queue.remove(request)
            else:
                self._running = [entry for entry in self._running if entry[2] is not request]
                heapq.heapify(self._running)
        else:
            end, _, request = heapq.heappop(self._running)
            self._progress = max(self._progress, end)
        request.is_over = True
        self._fill()
        return request

    def _fill(self) -> None:
        while self._queue and len(self._running) < self.slots(self._now_s):
            request = self._queue.popleft()
            self._count += 1
            heapq.heappush(self._running, (self._progress + request.tokens, self._count, request))


@dataclass(slots=True, kw_only=True)
class Record:
    """What came of it."""

    answers: list[tuple[int, float, int]] = field(default_factory=list)  # address, when, tokens
    minutes: list[tuple[int, int]] = field(default_factory=list)
    """Requests and tokens, as far as known, of the 60 s before each request, with it."""
    levels: list[tuple[float, int]] = field(default_factory=list)
    throttled: int = 0
    timed_out: int = 0

    def rate(self, since_s: float, until_s: float, address: int = 0) -> float:
        """Tokens per second."""
        tokens = sum(n for a, at_s, n in self.answers if a == address and since_s <= at_s < until_s)
        return tokens / (until_s - since_s)

    def levels_in(self, since_s: float, until_s: float) -> list[int]:
        return [level for at_s, level in self.levels if since_s <= at_s < until_s]


def simulate(
    servers: list[Server],
    duration_s: float,
    *,
    limits: list[AddressLimits] | None = None,
    seed: int = 0,
    sigma: float = 1.0,
    is_token_known: bool = True,
    max_concurrency: int = 2048,
    rows_per_s: float = math.inf,
) -> Record:
    """Run a client to which so many rows come."""
    rng, now_s, record = random.Random(seed), 0.0, Record()
    unlimited = [
        AddressLimits(name=f"http://{number}", max_concurrency=max_concurrency)
        for number in range(len(servers))
    ]
    share = Share(limits or unlimited, clock=lambda: now_s)
    num_rows = 0
    refusals: list[tuple[float, int]] = []
    minute: deque[Request] = deque()
    estimate = MEAN_TOKENS + PROMPT_TOKENS
    look_s = 0.0

    def most_rows() -> float:
        return math.inf if rows_per_s == math.inf else rows_per_s * now_s + 1

    def send_all() -> float:
        nonlocal num_rows
        while (rows_per_s == math.inf or num_rows < rows_per_s * now_s + 1) and (
            address := share.take(estimate)
        ) is not None:
            num_rows += 1
            server = servers[address]
            is_sporadic = server.sporadic > 0 and rng.random() < server.sporadic
            if is_sporadic or server.num_open >= server.bears(now_s):
                heapq.heappush(refusals, (now_s + REFUSAL_S, address))
                continue
            request = Request(
                now_s, max(1, round(MEAN_TOKENS * rng.lognormvariate(-sigma * sigma / 2, sigma)))
            )
            server.add(request)
            if limits is not None:
                minute.append(request)
                while minute[0].sent_s + 60 <= now_s:
                    minute.popleft()
                record.minutes.append((len(minute), sum(one.known_tokens for one in minute)))
        return max(now_s + share.wait_s(), num_rows / rows_per_s)

    ask_s = send_all()
    while True:
        ends_s = [server.next_s() for server in servers]
        refusal_s = refusals[0][0] if refusals else math.inf
        now_s = min(*ends_s, refusal_s, ask_s, look_s)
        if now_s >= duration_s:
            return record
        for server in servers:
            server.advance(now_s)
        if now_s == look_s:
            record.levels.append((now_s, share.capacity))
            look_s += duration_s / 400
        elif now_s == refusal_s:
            _, address = heapq.heappop(refusals)
            record.throttled += 1
            share.throttled(address, tokens_estimated=estimate, retry_after_s=servers[address].retry_after_s)
        elif now_s in ends_s:
            address = ends_s.index(now_s)
            request = servers[address].end_one()
            latency_s = now_s - request.sent_s
            if now_s >= request.sent_s + servers[address].timeout_s:
                record.timed_out += 1
                share.broken(address, reason="no answer", tokens_estimated=estimate, is_timeout=True)
            else:
                record.answers.append((address, now_s, request.tokens))
                share.answered(
                    address,
                    latency_s=latency_s,
                    tokens_estimated=estimate,
                    tokens=request.tokens + PROMPT_TOKENS if is_token_known else 0,
                )
        ask_s = send_all()
