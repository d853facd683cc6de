"""Answer random prompts by an engine that has nothing else to do: all at once, in groups, or with evictions."""

import math
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

from pipemax.vllm_ext.calibration.measure import random_tokens
from pipemax.vllm_ext.core_calls import copy_counts, held, resize_gpu
from pipemax.vllm_ext.launch.forecast import runtime_settings
from pipemax.vllm_ext.launch.known_calibration import block_tables
from pipemax.vllm_ext.node_check.verdicts import Answer, Run
from pipemax.vllm_ext.seam.vllm_types import (
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    VllmConfig,
    tokens_input,
)

Prompt = list[int]

MOST_PROMPTS, FEWEST_PROMPTS = 24, 4
OUTPUT_TOKENS = 24
_MOST_TOKENS = 256
"""Of a prompt and its output."""
_PROMPTS_PER_PREFETCH = 3
"""At most. In pools of a few dozen blocks many requests end before they have to leave; in others each leaves once or
more."""
_EVICTED_SHARE = 6
"""With evictions the pool holds this part of what the prompts need, so about as many of them run at once."""
_SHARE_OF_POOL = 0.8
"""Of the GPU's blocks, for all prompts together."""


def draw_prompts(vocabulary: int, longest: int, most_prompts: int = MOST_PROMPTS) -> list[Prompt]:
    """Return random prompts: the same ones for the same arguments."""
    rng = Random(0)
    return [
        random_tokens(rng, rng.randint(max(1, longest // 6), max(1, longest)), vocabulary)
        for _ in range(most_prompts)
    ]


def longest_prompt(max_model_len: int) -> int:
    """Return the tokens of the longest prompt that is drawn where nothing else limits it."""
    return min(_MOST_TOKENS, max_model_len) - OUTPUT_TOKENS


class KvPools:
    """The room for prompts in the pools of an engine under PipeMax."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        cache = vllm_config.cache_config
        self._groups = block_tables(vllm_config)
        self._block_tokens = cache.block_size
        gpu_blocks = (cache.num_gpu_blocks or 1) - 1  # vLLM keeps one as its null block
        host_blocks = runtime_settings(vllm_config).host_blocks(self._block_tokens)
        self._room = min(int(_SHARE_OF_POOL * gpu_blocks), host_blocks)

    @property
    def longest_prompt(self) -> int:
        """The tokens of prompts of which twice the fewest fit."""
        share = self._room * self._block_tokens // (2 * FEWEST_PROMPTS * self._groups.count)
        return share - OUTPUT_TOKENS

    def fitting(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the first prompts, as many as the pools hold all at once."""
        num_blocks, fitting = 0, list[Prompt]()
        for prompt in prompts:
            num_blocks += self._blocks(prompt)
            if num_blocks > self._room:
                break
            fitting.append(prompt)
        return fitting

    def evicting_blocks(self, prompts: Sequence[Prompt]) -> int:
        """Return a sixth of the blocks that the prompts need, or little more than the longest takes."""
        needs = [self._blocks(prompt) for prompt in prompts]
        return max(sum(needs) // _EVICTED_SHARE, max(needs) + 2 * self._groups.count)

    def _blocks(self, prompt: Prompt) -> int:
        num_tokens = len(prompt) + OUTPUT_TOKENS
        blocks = self._groups.prompt_blocks(num_tokens, self._block_tokens, in_flight_tokens=0)
        return blocks + self._groups.count


class Asking:
    """Asks one engine the same prompts, run after run."""

    def __init__(self, engine: LLMEngine, prompts: Sequence[Prompt]) -> None:
        self._engine = engine
        self._prompts = prompts
        self._numbers = count()

    def in_groups(self, size: int) -> Run:
        """Answer so many prompts at a time under stock vLLM, with nothing cached before."""
        answers: list[Answer] = []
        self._engine.reset_prefix_cache()
        for begin in range(0, len(self._prompts), size):
            prompts = self._prompts[begin : begin + size]
            self._add(ids := self._ids(len(prompts)), prompts)
            answers += self._wait(ids)
        return Run(answers=answers)

    def evicted(self, gpu_blocks: int, *, needs_prefetches: bool = True) -> Run:
        """Answer all prompts through so many GPU blocks under PipeMax. All begin together, with nothing cached."""
        resize_gpu(self._engine, gpu_blocks)
        with held(self._engine):
            self._add(ids := self._ids(len(self._prompts)), self._prompts)
        answers = self._wait(ids)
        counts = copy_counts(self._engine)
        return Run(
            answers=answers,
            prefetches=int(counts["prefetches"]),
            moved=f"{counts['evictions']:.0f} evictions, {counts['prefetched_blocks']:.0f} blocks prefetched",
            least_prefetches=len(ids) // _PROMPTS_PER_PREFETCH if needs_prefetches else 0,
        )

    def _ids(self, size: int) -> list[str]:
        return [f"check-{next(self._numbers)}" for _ in range(size)]

    def _add(self, ids: Sequence[str], prompts: Sequence[Prompt]) -> None:
        sampling = SamplingParams(
            max_tokens=OUTPUT_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,  # the chosen token's only
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._engine.add_request(request_id, tokens_input([*prompt]), sampling)

    def _wait(self, ids: Sequence[str]) -> list[Answer]:
        answers = {output.request_id: _as_answer(output) for output in self._finished()}
        return [answers[request_id] for request_id in ids]

    def _finished(self) -> Iterator[RequestOutput]:
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                assert isinstance(output, RequestOutput), output
                if output.finished:
                    yield output


def _as_answer(output: RequestOutput) -> Answer:
    (sequence,) = output.outputs
    tokens = tuple(sequence.token_ids)
    logprobs = [
        position[token].logprob
        for token, position in zip(tokens, sequence.logprobs or (), strict=True)
        if position
    ]
    return Answer(tokens=tokens, is_finite=len(logprobs) == len(tokens) and all(map(math.isfinite, logprobs)))
