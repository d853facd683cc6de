"""Compute equal requests once: a request that is known, or being computed, takes the answer of the first one.

Requests are equal if their keys are (``result_cache.cache_key``). Good answers are kept in the result cache. While a
request is being computed, equal ones wait for it instead of going to the engine, whichever session sent them, and take
its outcome, an error too: a row that fails, or kills the engine, is not run again for each of its copies. Errors are
not kept, so a later copy is tried again. If the session that sent the first request goes, the computation goes on for
those that wait; it is stopped when nobody waits any more.

A request that is sampled without a seed has an answer of its own, so it has no equal. This module knows nothing of
Flight or of credit, and of engines nothing but the loaded files that are part of a key.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pipemax.api import Completion, GenerationRequest
from pipemax.serve.rows.result_cache import ResultCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What becomes of requests that have arrived."""

    computed: list[tuple[GenerationRequest, bytes]]
    """Those that the engine must compute, with the keys that were given for them."""
    answered: list[Completion]
    """Answers that are known."""
    waiting: list[str]
    """Ids of those that wait for an equal request."""


@dataclass(slots=True)
class _Computation:
    """A request in the engine, and those that take its outcome."""

    key: bytes
    request_id: str
    is_wanted: bool = True
    """Whether its own session still waits for it."""
    waiting: dict[str, None] = field(default_factory=dict)


class EqualRequests:
    """The computations in flight of all sessions that reuse results. Thread-safe."""

    def __init__(self, cache: ResultCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._by_key: dict[bytes, _Computation] = {}
        self._by_id: dict[str, _Computation] = {}

    def admit(
        self, requests: Sequence[GenerationRequest], keys: Sequence[bytes], content: bytes
    ) -> Admission:
        """Tell which of these requests must be computed, and take note of them.

        ``content`` says which files the engine was loaded from: answers of other files are no answers.
        """
        admission = Admission(computed=[], answered=[], waiting=[])
        # Under one lock: between a look at the cache and the note, the equal request could end unseen.
        with self._lock:
            for request, key in zip(requests, keys, strict=True):
                if not _is_repeatable(request):
                    admission.computed.append((request, key))
                    continue
                self._admit(request, key, content + key, admission)
        return admission

    def record_ends(self, completions: Iterable[Completion]) -> list[Completion]:
        """Record outcomes of computations. Return the completions of the requests that waited for them."""
        others: list[Completion] = []
        with self._lock:
            for completion in completions:
                computation = self._by_id.pop(completion.request_id, None)
                if computation is None:
                    continue
                del self._by_key[computation.key]
                self._cache.keep(computation.key, completion)
                for request_id in computation.waiting:
                    del self._by_id[request_id]
                    others.append(replace(completion, request_id=request_id, token_ids=(), is_reused=True))
        return others

    def leave(self, request_ids: Sequence[str]) -> list[str]:
        """Forget that a session waits for these. Return the ids of the requests to stop: nobody waits for them.

        An id that is not known here is one of them. Leaving twice is harmless.
        """
        stopped = []
        with self._lock:
            for request_id in request_ids:
                computation = self._by_id.get(request_id)
                if computation is None:
                    stopped.append(request_id)
                    continue
                if computation.request_id == request_id:
                    computation.is_wanted = False
                else:
                    del self._by_id[request_id], computation.waiting[request_id]
                if not computation.is_wanted and not computation.waiting:
                    del self._by_key[computation.key], self._by_id[computation.request_id]
                    stopped.append(computation.request_id)
        return stopped

    @property
    def num_computing(self) -> int:
        """The number of requests that the engine computes for these sessions."""
        return len(self._by_key)

    def _admit(self, request: GenerationRequest, key: bytes, full_key: bytes, admission: Admission) -> None:
        known = self._cache.find(full_key, request_id=request.request_id)
        if known is not None:
            admission.answered.append(replace(known, is_reused=True))
            return
        computation = self._by_key.get(full_key)
        if computation is None:
            computation = _Computation(key=full_key, request_id=request.request_id)
            self._by_key[full_key] = computation
            admission.computed.append((request, key))
        else:
            computation.waiting[request.request_id] = None
            admission.waiting.append(request.request_id)
        self._by_id[request.request_id] = computation


def _is_repeatable(request: GenerationRequest) -> bool:
    """Tell whether an equal request must get an equal answer."""
    return request.sampling.temperature == 0 or request.sampling.seed is not None
