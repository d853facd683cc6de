"""Count how many tokens of further requests the engine may be sent between the scheduler's reports.

PipeMax's scheduler reports its room, but a step late: requests sent since are subtracted here. Stock vLLM reports none,
and keeps its own room by preempting: it may be sent ``capacity_tokens``, a multiple of what the KV cache holds. Each
request then counts as its prompt and the mean output so far, because most outputs are far shorter than ``max_tokens``.

Host memory stays bounded however long the outputs turn out. Prompts count in full: once those of the held requests have
``capacity_tokens``, there is no credit. Only requests that run or were preempted have outputs, and as vLLM takes
preempted ones first, they are at most ``max_num_seqs``.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_MEMORY = 100
"""Number of outputs from which on older ones count less: the next rows' may be longer."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    prompt: int = 0
    most_output: int = 0


class AdmissionBook:
    """Which requests the engine holds, and which of them its scheduler has not heard of. Thread-safe."""

    def __init__(self, capacity_tokens: int, *, scheduler_reports: bool) -> None:
        """Begin with an empty engine, which may be sent ``capacity_tokens``.

        ``scheduler_reports`` tells whether the scheduler will report its room, as PipeMax's does.
        """
        self._capacity_tokens = capacity_tokens
        self._scheduler_reports = scheduler_reports
        self._lock = threading.Lock()
        # An id leaves when it completes or is aborted.
        self._held: dict[str, _Tokens] = {}
        self._held_prompt_tokens = 0
        self._held_most_output_tokens = 0
        self._num_outputs = 0
        self._mean_output_tokens = 0.0
        self._unknown: dict[str, _Tokens] = {}
        self._sent: deque[str] = deque()  # in the order in which the scheduler hears of them
        self._num_known = 0
        self._demand_tokens: float | None = None
        self._mean_tokens = 0.0

    @property
    def is_empty(self) -> bool:
        with self._lock:
            return not self._held

    def submit(self, request_id: str, *, prompt_tokens: int, most_output_tokens: int) -> None:
        tokens = _Tokens(prompt_tokens, most_output_tokens)
        with self._lock:
            self._held[request_id] = tokens
            if self._scheduler_reports:
                self._unknown[request_id] = tokens
            self._held_prompt_tokens += tokens.prompt
            self._held_most_output_tokens += tokens.most_output

    def send(self, request_id: str) -> None:
        """Record that a request is on its way to the scheduler, behind all that were sent before."""
        if self._scheduler_reports:  # without reports nothing would ever leave
            with self._lock:
                self._sent.append(request_id)

    def learn(self, output_tokens: Iterable[int]) -> None:
        """Learn from the outputs of requests that have ended by themselves."""
        with self._lock:
            for tokens in output_tokens:
                self._num_outputs += 1
                self._mean_output_tokens += (tokens - self._mean_output_tokens) / min(
                    self._num_outputs, _MEMORY
                )

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests that completed, were refused or aborted; ids that are not held are ignored."""
        with self._lock:
            for request_id in request_ids:
                tokens = self._held.pop(request_id, _Tokens())
                self._held_prompt_tokens -= tokens.prompt
                self._held_most_output_tokens -= tokens.most_output
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
            if not self._scheduler_reports:
                return self._capacity_tokens - self._held_prompt_tokens - self._expected_output_tokens()
            if self._demand_tokens is None:
                return self._capacity_tokens - self._held_prompt_tokens - self._held_most_output_tokens
            if self._mean_tokens:
                return int(self._demand_tokens - len(self._unknown) * self._mean_tokens)
            most_tokens = sum(tokens.prompt + tokens.most_output for tokens in self._unknown.values())
            return int(self._demand_tokens - most_tokens)

    def _expected_output_tokens(self) -> int:
        """Return the expected output of all held requests; the maximum before any output has ended."""
        if not self._num_outputs:
            return self._held_most_output_tokens
        return min(self._held_most_output_tokens, int(len(self._held) * self._mean_output_tokens))
