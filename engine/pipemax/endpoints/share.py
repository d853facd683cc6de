"""Decide which address takes the next request, and how many may be open at once.

Pure decisions about one server's addresses: ``level`` finds how many requests each takes, ``pace`` keeps the limits per
minute, ``rest`` leaves out what fails. A request goes to the address that has the smallest share of its level open, so
the fastest gets the most. Knows nothing of HTTP, rows or keys. Not thread-safe.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipemax.endpoints.level import Level
from pipemax.endpoints.pace import Pace
from pipemax.endpoints.rest import Rest

_MIN_WAIT_S = 0.001
_MAX_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressLimits:
    """One address of an endpoint, and what the user allows there."""

    name: str
    """``scheme://host[:port]``, for messages; never a key."""
    max_concurrency: int
    """Requests open at once, at most."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Of prompts and outputs."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise ValueError(f"{self.name}: max_concurrency must be 1 or more, not {self.max_concurrency}")
        for field in ("requests_per_minute", "tokens_per_minute"):
            limit = getattr(self, field)
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"{self.name}: {field} must be above 0, not {limit}")


class _Address:
    """The state of one address."""

    def __init__(self, limits: AddressLimits) -> None:
        self.level = Level(limits.max_concurrency)
        self.rest = Rest(limits.name)
        self.pace = Pace(
            requests_per_minute=limits.requests_per_minute, tokens_per_minute=limits.tokens_per_minute
        )
        self.answered_at_s = -math.inf
        self.num_older = 0  # open requests that were sent before the last rest began
        self.num_throttled = self.num_broken = 0

    def capacity(self, now_s: float) -> int:
        if self.rest.is_left_out:
            return 0 if self.rest.is_resting(now_s) else 1
        return self.level.limit

    def has_room(self) -> bool:
        is_tried = self.rest.is_left_out and self.level.num_open > self.num_older
        return self.level.has_room and not is_tried

    def send(self, now_s: float, tokens: int) -> None:
        self.level.open(now_s)
        self.rest.send()
        self.pace.send(now_s, tokens)

    def live(self, now_s: float) -> None:
        if self.rest.live(now_s):
            self.level.start_again(now_s)
        self.num_older = 0

    def fail(self, now_s: float, reason: str) -> None:
        if self.rest.fail(now_s, reason, level=self.level.limit):
            self.num_older = self.level.num_open
        else:
            self.end()

    def end(self) -> None:
        """Count the end of a request that says nothing of the address."""
        self.num_older = max(0, self.num_older - 1)


class Share:
    """The addresses of one endpoint, by index as in the sequence that it was made from."""

    def __init__(
        self, addresses: Sequence[AddressLimits], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not addresses:
            raise ValueError("an endpoint needs at least one address")
        self._addresses = [_Address(limits) for limits in addresses]
        self._clock = clock
        self._lived_at_s: float | None = None
        self._has_failed = False  # since the last answer or refusal
        self._wanted_tokens = 0

    def take(self, tokens: int, *, avoid: frozenset[int] = frozenset()) -> int | None:
        """Return the address that takes a request of about so many tokens now; None if none can.

        ``avoid``: addresses at which this request has failed. One of them takes it only while all others are left out.
        """
        now_s = self._clock()
        self._wanted_tokens = tokens
        indices = [
            index
            for index, address in enumerate(self._addresses)
            if index not in avoid and not address.rest.is_resting(now_s)
        ]
        ready = [
            index
            for index in indices or range(len(self._addresses))
            if self._addresses[index].has_room()
            and not self._addresses[index].rest.wait_s(now_s)
            and not self._addresses[index].pace.wait_s(now_s, tokens)
        ]
        if not ready:
            return None
        chosen = min(ready, key=self._load)
        self._send(now_s, self._addresses[chosen], tokens)
        return chosen

    def wait_s(self) -> float:
        """Return after how many seconds to ask again at the latest, when ``take`` has returned None.

        Ask again after each answer or failure too.
        """
        now_s = self._clock()
        waits_s = [
            max(address.rest.wait_s(now_s), address.pace.wait_s(now_s, self._wanted_tokens))
            for address in self._addresses
            if address.has_room()
        ]
        return max(_MIN_WAIT_S, min([_MAX_WAIT_S, *waits_s]))

    def answered(self, address: int, *, latency_s: float, tokens_estimated: int, tokens: int) -> None:
        """Count a good answer. ``tokens``: of prompt and output; 0 where the server does not say."""
        now_s, state = self._clock(), self._addresses[address]
        state.answered_at_s = now_s
        if tokens > 0:
            state.pace.correct(now_s, now_s - latency_s, estimated=tokens_estimated, tokens=tokens)
        state.level.answer(now_s, latency_s, float(tokens or 1))
        self._live(now_s, state)

    def refused(self, address: int, *, tokens_estimated: int) -> None:
        """Count a request that the server refuses for what it asks: 400, 413, 422. The server lives."""
        now_s, state = self._clock(), self._addresses[address]
        state.level.close(now_s)
        self._live(now_s, state)

    def throttled(self, address: int, *, tokens_estimated: int, retry_after_s: float | None) -> None:
        """Count a request that the server is too busy for: 429, 503, 529."""
        now_s, state = self._clock(), self._addresses[address]
        state.num_throttled += 1
        state.level.throttle(now_s, retry_after_s or 0.0)
        state.rest.pause(now_s, retry_after_s)
        state.end()
        self._has_failed = True

    def broken(
        self,
        address: int,
        *,
        reason: str,
        tokens_estimated: int,
        is_timeout: bool,
        began_s: float = math.inf,
    ) -> None:
        """Count a request that failed: a reset, 5xx, a time-out, a body that is no JSON.

        It says nothing against the address if that has answered others since ``began_s`` on the clock.
        """
        now_s, state = self._clock(), self._addresses[address]
        state.num_broken += 1
        if is_timeout:
            state.level.time_out(now_s)
        else:
            state.level.close(now_s)
        if state.answered_at_s > began_s:
            state.end()
        else:
            state.fail(now_s, reason)
        self._has_failed = True

    def released(self, address: int, *, tokens_estimated: int) -> None:
        """Count a request that the caller gave up."""
        state = self._addresses[address]
        state.level.close(self._clock())
        state.end()

    def lives(self, address: int) -> None:
        """Count an answer to a request that was no row's."""
        now_s, state = self._clock(), self._addresses[address]
        state.answered_at_s = now_s
        self._live(now_s, state)

    def is_reached(self, address: int) -> None:
        """Count a refusal, because it is busy, of a request that was no row's: no reason to leave the address out."""
        self._addresses[address].live(self._clock())

    def answered_others_since(self, address: int, since_s: float) -> bool:
        """Return whether the address has given a good answer after ``since_s`` on the clock."""
        return self._addresses[address].answered_at_s > since_s

    @property
    def capacity(self) -> int:
        """How many requests may be open at once now, over all addresses; at least 1."""
        now_s = self._clock()
        return max(1, sum(address.capacity(now_s) for address in self._addresses))

    @property
    def open_requests(self) -> int:
        return sum(address.level.num_open for address in self._addresses)

    @property
    def silent_s(self) -> float:
        """Seconds since any address has answered or refused a request, or since the first was sent; 0 before it.

        The time in which nothing was asked, because there were no rows, does not count.
        """
        return 0.0 if self._lived_at_s is None else self._clock() - self._lived_at_s

    def take_notes(self) -> list[str]:
        """Return sentences for the log that came up since the last call."""
        return [note for address in self._addresses for note in address.rest.take_notes()]

    def figures(self) -> dict[str, float]:
        """Return figures for metrics, of all addresses together."""
        now_s = self._clock()
        return {
            "level": sum(address.capacity(now_s) for address in self._addresses),
            "open": self.open_requests,
            "throttled": sum(address.num_throttled for address in self._addresses),
            "broken": sum(address.num_broken for address in self._addresses),
            "left_out": sum(address.rest.is_left_out for address in self._addresses),
        }

    def _load(self, index: int) -> float:
        level = self._addresses[index].level
        return (level.num_open + 1) / level.limit

    def _send(self, now_s: float, address: _Address, tokens: int) -> None:
        if self._lived_at_s is None or (self.open_requests == 0 and not self._has_failed):
            self._lived_at_s = now_s
        address.send(now_s, tokens)

    def _live(self, now_s: float, address: _Address) -> None:
        address.live(now_s)
        self._lived_at_s, self._has_failed = now_s, False
