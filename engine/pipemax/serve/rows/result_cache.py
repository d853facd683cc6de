"""Keep answers for rows that are asked again: Spark evaluates a column as often as it sees fit.

The cache is bounded by bytes, drops the least recently used answers first, and lives as long as the server. Errors are
not kept: what failed once is tried again. It knows requests and completions, and nothing of sessions. Its callers add
to the key which files the engine was loaded from (``pipemax.checkpoint.fingerprint``), because an engine of the same
config may answer differently once it is loaded again.
"""

import hashlib
import json
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache

from cachetools import LRUCache

from pipemax.api import Completion, GenerationRequest, Sampling
from pipemax.checkpoint.image_sources import version_of

KEY_BYTES = 16
_ENTRY_BYTES = 600
"""Rough size of an entry without its texts: key, completion, and their places in the table."""


class ResultCache:
    """Good answers by ``cache_key``, up to ``max_bytes``. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._entries: LRUCache[bytes, Completion] = LRUCache(max_bytes, getsizeof=_size)

    def find(self, key: bytes, *, request_id: str) -> Completion | None:
        """Return the answer under the key as one to this request, or ``None`` if there is none."""
        with self._lock:
            known = self._entries.get(key)
        return None if known is None else replace(known, request_id=request_id)

    def keep(self, key: bytes, completion: Completion) -> None:
        """Keep a good answer; an error is not kept."""
        if completion.error is not None:
            return
        with self._lock, suppress(ValueError):  # larger than the whole cache
            self._entries.setdefault(key, replace(completion, token_ids=()))


def cache_key(engine_id: str, request: GenerationRequest) -> bytes:
    """Return a key that is equal for requests that this engine must answer alike, in every process.

    Everything but the request's id counts; of an image's file, its size and the time of its last change.
    """
    if request.messages is None and request.prompt is not None:
        content = b"prompt" + request.prompt.encode(errors="surrogatepass")
    else:
        turns = request.messages and [turn.identity() for turn in request.messages]
        files = [version_of(image) for image in request.images]
        content = json.dumps([request.prompt, turns, *files]).encode()
    # Of fixed length, so that its end is unambiguous.
    common = _common_key(engine_id, request.system, request.sampling)
    return hashlib.blake2b(common + content, digest_size=KEY_BYTES).digest()


@lru_cache(maxsize=1_024)
def _common_key(engine_id: str, system: str | None, sampling: Sampling) -> bytes:
    """Digest what most rows of a job have in common."""
    # Always as floats: 1 and 1.0 are one entry of this cache, and must be one text.
    floats = {"temperature": float(sampling.temperature), "top_p": float(sampling.top_p)}
    content = json.dumps([engine_id, system, asdict(sampling) | floats], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=KEY_BYTES).digest()


def _size(completion: Completion) -> int:
    texts = [completion.text, completion.reasoning, *(completion.samples or ())]
    return (
        _ENTRY_BYTES
        + sum(sys.getsizeof(text or "") for text in texts)
        + 100 * len([*(completion.probabilities or ()), *(completion.field_probabilities or ())])
        + len(completion.embedding or b"")
    )
