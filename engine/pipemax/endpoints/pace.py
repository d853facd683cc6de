"""Keep what is sent to one address within its limits per minute.

In any 60 s no more is sent than the limit, so the server may count its minutes as it likes. Tokens count as estimated
until the answer says how many they were. A request that alone is above the limit of tokens is sent once nothing else
was sent for a minute: estimates are mostly too high, and the server knows. Knows nothing of requests or servers.
"""

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0


@dataclass(slots=True)
class _Sent:
    at_s: float
    estimated: int
    tokens: int
    is_known: bool = False
    """Whether the answer has said how many tokens they were."""


class Pace:
    """What was sent to one address in the last minute."""

    def __init__(self, *, requests_per_minute: float | None, tokens_per_minute: float | None) -> None:
        self._max_tokens = math.inf if tokens_per_minute is None else tokens_per_minute
        self._max_requests = math.inf if requests_per_minute is None else requests_per_minute
        self._window_s = WINDOW_S
        if self._max_requests < 1:  # one request in several minutes
            self._window_s, self._max_requests = WINDOW_S / self._max_requests, 1
        self._sent: deque[_Sent] = deque()
        self._tokens = 0

    @property
    def is_limited(self) -> bool:
        return min(self._max_requests, self._max_tokens) < math.inf

    def send(self, now_s: float, tokens: int) -> None:
        """Count a request that is sent."""
        if self.is_limited:
            self._sent.append(_Sent(now_s, tokens, tokens))
            self._tokens += tokens

    def wait_s(self, now_s: float, tokens: int) -> float:
        """Return in how many seconds a request of so many tokens may be sent; 0 for now."""
        self._forget(now_s)
        requests, total = len(self._sent) + 1, self._tokens + tokens
        if requests <= self._max_requests and (total <= self._max_tokens or not self._sent):
            return 0.0
        for sent in self._sent:
            requests, total = requests - 1, total - sent.tokens
            if requests <= self._max_requests and total <= self._max_tokens:
                return max(0.0, sent.at_s + self._window_s - now_s)
        return self._sent[-1].at_s + self._window_s - now_s

    def correct(self, now_s: float, sent_s: float, *, estimated: int, tokens: int) -> None:
        """Replace the estimate of the request that was sent at about ``sent_s`` by its tokens."""
        self._forget(now_s)
        if self._max_tokens == math.inf or sent_s + self._window_s <= now_s:
            return
        open_ones = [sent for sent in self._sent if sent.estimated == estimated and not sent.is_known]
        if open_ones:
            nearest = min(open_ones, key=lambda sent: abs(sent.at_s - sent_s))
            self._tokens += tokens - nearest.tokens
            nearest.tokens, nearest.is_known = tokens, True

    def _forget(self, now_s: float) -> None:
        while self._sent and self._sent[0].at_s + self._window_s <= now_s:
            self._tokens -= self._sent.popleft().tokens
