"""Decide which replica gets a row: the one with the least work, or the one that holds the row's prefix.

Replicas are known by numbers, rows by their expected tokens and by keys of their beginnings. A beginning that several
rows share is in the KV cache of the replicas that had one of them. Such a replica is preferred as long as it has little
more work than the least busy one: at most the tokens that the prefix saves, and a tenth of the mean.

A replica's work is what its rows are expected to need in all. How far they have come is not known here.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from pipemax.generation import GenerationRequest

CHARS_PER_TOKEN = 4.0
"""To turn the length of a shared beginning into tokens saved."""
UNEVENNESS = 0.1
"""Share of the mean work by which a replica with the prefix may lie above the least busy one, besides what it saves."""
_SHORTEST_PREFIX_CHARS = 256
_LONGEST_PREFIX_CHARS = 16_384
_REMEMBERED_PREFIXES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKey:
    """The beginning of a prompt."""

    digest: bytes
    chars: int


def prefix_keys(request: GenerationRequest) -> tuple[PrefixKey, ...]:
    """Return keys of the prompt's beginnings, the longest first: 256, 512, 1,024, … characters, as far as it goes."""
    text = leading_text(request, limit_chars=_LONGEST_PREFIX_CHARS)
    digest = hashlib.blake2b(digest_size=8)
    keys: list[PrefixKey] = []
    begin, end = 0, _SHORTEST_PREFIX_CHARS
    while end <= len(text):
        digest.update(text[begin:end].encode("utf-8", "surrogatepass"))
        keys.append(PrefixKey(digest=digest.digest(), chars=end))
        begin, end = end, 2 * end
    return tuple(reversed(keys))


def leading_text(request: GenerationRequest, *, limit_chars: int) -> str:
    """Return the beginning of what the model will read, as far as the request itself says it."""
    parts = [request.system or ""]
    if request.prompt is not None:
        parts.append(request.prompt[:limit_chars])
    parts += [text[:limit_chars] for message in request.messages or () for text in message.texts]
    return "\0".join(parts)[:limit_chars]


class Router:
    """Chooses replicas, and remembers which prefixes each of them has had."""

    def __init__(self) -> None:
        self._holders: LRUCache[PrefixKey, frozenset[int]] = LRUCache(_REMEMBERED_PREFIXES)

    def choose(self, prefixes: Sequence[PrefixKey], work_tokens: Mapping[int, float]) -> int:
        """Return the replica for a row, one of those in ``work_tokens``, and note that it holds the row's prefixes.

        ``prefixes`` are as from ``prefix_keys``. ``work_tokens`` is what each replica has to do, in tokens.
        """
        chosen = self._holder_of(prefixes, work_tokens)
        if chosen is None:
            chosen = min(work_tokens, key=lambda replica: (work_tokens[replica], replica))
        for key in prefixes:
            self._holders[key] = self._holders.get(key, frozenset()) | {chosen}
        return chosen

    def forget(self, replica: int) -> None:
        """Note that a replica has lost its KV."""
        for key, holders in list(self._holders.items()):
            if replica in holders:
                self._holders[key] = holders - {replica}

    def _holder_of(self, prefixes: Sequence[PrefixKey], work_tokens: Mapping[int, float]) -> int | None:
        """Return the least busy holder of the longest prefix that any of the replicas holds, unless it is too busy."""
        mean_tokens = sum(work_tokens.values()) / len(work_tokens)
        least_tokens = min(work_tokens.values())
        for key in prefixes:
            holders = self._holders.get(key, frozenset()) & work_tokens.keys()
            if not holders:
                continue
            best = min(holders, key=lambda replica: (work_tokens[replica], replica))
            saved_tokens = key.chars / CHARS_PER_TOKEN
            if work_tokens[best] - least_tokens <= saved_tokens + UNEVENNESS * mean_tokens:
                return best
        return None
