"""What the workers of a virtual node know of each request: its tokens, its KV blocks, and when its output ends.

Output tokens are a function of the prompt and the position, so equal prompts have equal outputs and a request that is
computed again makes the same tokens. The token that ends an output is ``END_TOKEN``: requests name it as their stop
token. The module knows no times and nothing of vLLM.

    the identity of a block's KV    full: a digest of all tokens up to the block's end, the same for equal prefixes
                                    partly filled: of its request and its place there, for nobody else can use it
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lab.virtual_node.kv_order import StepKv
from pipemax.domain.units import ceil_div
from pipemax.sim.stage_times import StepWork, prompt_pairs

END_TOKEN = 2
_FIRST_TOKEN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTokens:
    """One request's tokens ``[first, first + num)`` in a step."""

    request_id: str
    first: int
    num: int


@dataclass(slots=True, kw_only=True)
class _Sequence:
    tokens: "array[int]"
    """All tokens, those that steps in flight make included."""
    num_prompt: int
    num_outputs: int
    seed: int
    tables: list[list[int]]
    """Of blocks, by group of layers."""
    identities: list[int] = field(default_factory=list)
    """Of the leading blocks, as far as they are known: full ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """What a step computes."""

    work: StepWork
    sampled: dict[str, list[int]]
    """By request, in the order of the step: the token that it makes, or none within a prompt."""
    kv: StepKv | None
    """What it reads and writes, if that is to be checked."""


class Sequences:
    """All requests that the workers know. Not thread-safe."""

    def __init__(self, *, vocab_size: int, block_tokens: int, lists_kv: bool = True) -> None:
        """``lists_kv``: whether steps say which KV they read and write."""
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._lists_kv = lists_kv
        self._sequences: dict[str, _Sequence] = {}
        self.windows: Sequence[int | None] = (None,)
        """The window of each group of layers, in tokens; None for those with full attention."""

    def __len__(self) -> int:
        return len(self._sequences)

    def start(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        num_prompt: int,
        num_outputs: int,
        blocks: Sequence[Sequence[int]],
    ) -> None:
        """Take in a request that is new to the workers, or was forgotten: its tokens, and its blocks by group."""
        prompt = tuple(tokens[:num_prompt])
        self._sequences[request_id] = _Sequence(
            tokens=array("i", tokens),
            num_prompt=num_prompt,
            num_outputs=num_outputs,
            seed=hash(prompt),
            tables=[[*table] for table in blocks],
        )

    def append_blocks(self, request_id: str, blocks: Sequence[Sequence[int]]) -> None:
        for table, more in zip(self._sequences[request_id].tables, blocks, strict=True):
            table += more

    def replace_blocks(self, request_id: str, blocks: Sequence[Sequence[int]]) -> None:
        self._sequences[request_id].tables = [[*table] for table in blocks]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or lost their state; unknown ones are ignored."""
        for request_id in request_ids:
            self._sequences.pop(request_id, None)

    def run(self, scheduled: Iterable[ScheduledTokens]) -> RunStep:
        """Compute a step."""
        work, sampled, kv = StepWork(), dict[str, list[int]](), _KvList(self._block_tokens)
        for part in scheduled:
            sequence = self._sequences[part.request_id]
            end = part.first + part.num
            assert end <= len(sequence.tokens), f"{part} is beyond the {len(sequence.tokens)} tokens known"
            num_blocks = ceil_div(end, self._block_tokens)
            held = min(map(len, sequence.tables))
            assert num_blocks <= held, f"{part} has {held} blocks"
            if self._lists_kv:
                kv.add(part, sequence, self.windows)
            makes_token = end == len(sequence.tokens)
            _add(work, part, is_decode=part.num == 1 and part.first >= sequence.num_prompt, ends=makes_token)
            sampled[part.request_id] = [self._sample(sequence)] if makes_token else []
        return RunStep(work=work, sampled=sampled, kv=kv.to_step() if self._lists_kv else None)

    def _sample(self, sequence: _Sequence) -> int:
        position = len(sequence.tokens)
        if position - sequence.num_prompt + 1 == sequence.num_outputs:
            token = END_TOKEN
        else:
            token = _FIRST_TOKEN + (sequence.seed + 7919 * position) % (self._vocab_size - _FIRST_TOKEN)
        sequence.tokens.append(token)
        return token


def _add(work: StepWork, part: ScheduledTokens, *, is_decode: bool, ends: bool) -> None:
    if is_decode:
        work.decode_requests += 1
        work.decode_context_tokens += part.first
        return
    work.prefill_tokens += part.num
    work.prefill_pairs += prompt_pairs(part.first, part.num)
    work.prefill_outputs += ends


class _KvList:
    """Gathers what the parts of a step read and write."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._reads: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._requests: list[str] = []
        self._writes: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])

    def add(self, part: ScheduledTokens, sequence: _Sequence, windows: Sequence[int | None]) -> None:
        self._extend_identities(sequence, (part.first + part.num) // self._block_tokens)
        for group, (table, window) in enumerate(zip(sequence.tables, windows, strict=True)):
            self._add_table(part, sequence.identities, group, table, window)

    def _add_table(
        self,
        part: ScheduledTokens,
        full_identities: Sequence[int],
        group: int,
        table: Sequence[int],
        window: int | None,
    ) -> None:
        size, end = self._block_tokens, part.first + part.num
        first_read = 0 if window is None else max(0, part.first - window + 1) // size
        end_read, tail = ceil_div(part.first, size), part.first % size
        num_read = end_read - first_read
        blocks, identities, ends = self._reads
        blocks += table[first_read:end_read]
        identities += [identity + group for identity in full_identities[first_read:end_read]]
        ends += [size] * num_read
        if tail:
            identities[len(blocks) - 1 :] = [_partial_identity(part.request_id, end_read - 1) - group]
            ends[-1] = tail
        self._requests += [part.request_id] * num_read
        for index in range(part.first // size, ceil_div(end, size)):
            if end >= (index + 1) * size:
                identity = full_identities[index] + group
            else:
                identity = _partial_identity(part.request_id, index) - group
            first = max(0, part.first - index * size)
            entry = (table[index], identity, first, min(size, end - index * size))
            for column, value in zip(self._writes, entry, strict=True):
                column.append(value)

    def to_step(self) -> StepKv:
        reads = [np.array(column, dtype=np.int64) for column in self._reads]
        writes = [np.array(column, dtype=np.int64) for column in self._writes]
        return StepKv(
            read_blocks=reads[0],
            read_identities=reads[1],
            read_ends=reads[2],
            read_requests=self._requests,
            written_blocks=writes[0],
            written_identities=writes[1],
            written_firsts=writes[2],
            written_ends=writes[3],
        )

    def _extend_identities(self, sequence: _Sequence, num_full: int) -> None:
        size, identities = self._block_tokens, sequence.identities
        for index in range(len(identities), num_full):
            before = identities[-1] if identities else 0
            digest = hash((before, *sequence.tokens[index * size : (index + 1) * size]))
            identities.append(1 + digest % _IDENTITIES)


_IDENTITIES = 1 << 61


def _partial_identity(request_id: str, index: int) -> int:
    return -1 - hash((request_id, index)) % _IDENTITIES
