"""What the workers of a virtual node know of each request: its tokens, its KV blocks, and when its output ends.

Output tokens are a function of the prompt and the position, so equal prompts have equal outputs and a request that is
computed again makes the same tokens. The token that ends an output is ``END_TOKEN``: requests name it as their stop
token. The module knows no times and nothing of vLLM.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    blocks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """What a step computes."""

    work: StepWork
    sampled: dict[str, list[int]]
    """By request, in the order of the step: the token that it makes, or none within a prompt."""


class Sequences:
    """All requests that the workers know. Not thread-safe."""

    def __init__(self, *, vocab_size: int, block_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def start(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        num_prompt: int,
        num_outputs: int,
        blocks: Sequence[int],
    ) -> None:
        """Take in a request that is new to the workers, or was forgotten: its tokens so far, and its blocks."""
        prompt = tuple(tokens[:num_prompt])
        self._sequences[request_id] = _Sequence(
            tokens=array("i", tokens),
            num_prompt=num_prompt,
            num_outputs=num_outputs,
            seed=hash(prompt),
            blocks=[*blocks],
        )

    def append_blocks(self, request_id: str, blocks: Sequence[int]) -> None:
        self._sequences[request_id].blocks += blocks

    def replace_blocks(self, request_id: str, blocks: Sequence[int]) -> None:
        self._sequences[request_id].blocks = [*blocks]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or lost their state; unknown ones are ignored."""
        for request_id in request_ids:
            self._sequences.pop(request_id, None)

    def run(self, scheduled: Iterable[ScheduledTokens]) -> RunStep:
        """Compute a step."""
        work, sampled = StepWork(), dict[str, list[int]]()
        for part in scheduled:
            sequence = self._sequences[part.request_id]
            end = part.first + part.num
            assert end <= len(sequence.tokens), f"{part} is beyond the {len(sequence.tokens)} tokens known"
            num_blocks = ceil_div(end, self._block_tokens)
            assert num_blocks <= len(sequence.blocks), f"{part} has {len(sequence.blocks)} blocks"
            makes_token = end == len(sequence.tokens)
            _add(work, part, is_decode=part.num == 1 and part.first >= sequence.num_prompt, ends=makes_token)
            sampled[part.request_id] = [self._sample(sequence)] if makes_token else []
        return RunStep(work=work, sampled=sampled)

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
