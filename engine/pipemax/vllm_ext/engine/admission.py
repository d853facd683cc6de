"""Count how many tokens of further requests the engine may be sent between the scheduler's reports.

The scheduler reports its room, but a step late: requests sent since are subtracted here. Without such reports (stock
vLLM) the room is ``capacity_tokens``, a multiple of what the KV cache holds.
"""

import threading
from collections import deque
from collections.abc import Iterable


class AdmissionBook:
    """Which requests the engine holds, and which of them its scheduler has not heard of. Thread-safe."""

    def __init__(self, capacity_tokens: int) -> None:
        """Begin with an empty engine, which may be sent ``capacity_tokens``."""
        self._capacity_tokens = capacity_tokens
        self._lock = threading.Lock()
        # Request id → the most tokens that it can come to hold. An id leaves when it completes or is aborted.
        self._held: dict[str, int] = {}
        self._held_tokens = 0
        self._unknown: dict[str, int] = {}
        self._sent: deque[str] = deque()  # in the order in which the scheduler hears of them
        self._num_known = 0
        self._demand_tokens: float | None = None
        self._mean_tokens = 0.0

    @property
    def is_empty(self) -> bool:
        with self._lock:
            return not self._held

    def submit(self, request_id: str, tokens: int) -> None:
        with self._lock:
            self._held[request_id] = self._unknown[request_id] = tokens
            self._held_tokens += tokens

    def send(self, request_id: str) -> None:
        """Record that a request is on its way to the scheduler, behind all that were sent before."""
        with self._lock:
            self._sent.append(request_id)

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests that completed, were refused or aborted; ids that are not held are ignored."""
        with self._lock:
            for request_id in request_ids:
                self._held_tokens -= self._held.pop(request_id, 0)
                self._unknown.pop(request_id, None)

    def report(self, *, demand_tokens: float, mean_tokens: float, num_known: int) -> None:
        """Take in the scheduler's report.

        ``demand_tokens`` is its room beyond the first ``num_known`` requests that it was ever sent, ``mean_tokens`` the
        mean tokens of a request (0 if it has none).
        """
        with self._lock:
            while self._num_known < num_known and self._sent:
                self._unknown.pop(self._sent.popleft(), None)
                self._num_known += 1
            self._demand_tokens = demand_tokens
            self._mean_tokens = mean_tokens

    def credit_tokens(self) -> int:
        """Return how many tokens may be sent now; negative if more wait than will fit."""
        with self._lock:
            if not self._held:
                return self._capacity_tokens
            if self._demand_tokens is None:
                return self._capacity_tokens - self._held_tokens
            unknown_tokens = (
                len(self._unknown) * self._mean_tokens if self._mean_tokens else sum(self._unknown.values())
            )
            return int(self._demand_tokens - unknown_tokens)
