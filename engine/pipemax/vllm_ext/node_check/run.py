"""Check an engine under PipeMax on the machine that it runs on, before it is given any row.

    copies      known bytes through every lane of every worker, compared byte for byte
    tokens      some prompts without any eviction, then again through a GPU pool so small that they have to leave it
                and come back: with poison under every prefetch, and as the engine will run
    overlap     the share of the prefetches' time that steps did not wait for, of the last of these runs

The engine must have nothing else to do. Its pools are overwritten, and it is left empty.
"""

import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random

import torch
import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from pipemax import __version__
from pipemax.config import EngineConfig, Policy
from pipemax.domain.errors import EngineStartError
from pipemax.domain.units import ceil_div
from pipemax.vllm_ext.calibration.measure import random_tokens
from pipemax.vllm_ext.core_calls import copy_counts, resize_gpu, separated, take_profile
from pipemax.vllm_ext.launch.forecast import runtime_settings
from pipemax.vllm_ext.launch.known_calibration import block_tables, device_name, model_name
from pipemax.vllm_ext.launch.known_check import CheckPart, NodeCheck, keep_check, kept_check
from pipemax.vllm_ext.node_check.answers import Answer, Comparison, compare, tolerance_of
from pipemax.vllm_ext.worker.copy_calls import check_copies, poison_prefetches

log = logging.getLogger(__name__)

_MOST_PROMPTS, _FEWEST_PROMPTS = 24, 4
_MOST_TOKENS = 256
"""Of a prompt and its output."""
_OUTPUT_TOKENS = 24
_PROMPTS_PER_PREFETCH = 3
"""At most. In pools of a few dozen blocks many requests end before they have to leave; in others each leaves once or
more."""
_LIKELIEST = 5
"""Tokens whose log probabilities are asked for, at each position."""
_EVICTED_SHARE = 6
"""With evictions the pool holds this part of what the prompts need, so about as many of them run at once."""
_SHARE_OF_POOL = 0.8
"""Of the GPU's blocks, for all prompts together, so that none leaves it in the first runs."""
_LEAST_HIDDEN = 0.8
"""On a GPU, where copies have engines of their own. On a CPU they share the cores with the model."""


def check_at_start(engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig) -> None:
    """Check an engine that has just started, unless this machine is known under it.

    ``EngineStartError`` if the check fails, or has failed before.
    """
    if config.policy is not Policy.PIPEMAX or not config.check_at_start:
        return
    check = kept_check(config, vllm_config)
    if check is None:
        log.info("nothing is known of PipeMax on this machine: checking copies and tokens")
        check = check_engine(engine, vllm_config, config)
        keep_check(config, vllm_config, check)
        for part in check.parts:
            log.info("%s %s: %s", "passed" if part.passed else "FAILED", part.name, part.detail)
    if not check.passed:
        raise EngineStartError(f"{check.refusal()}, policy: vllm runs without what failed")


def check_engine(
    engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig, *, most_prompts: int = _MOST_PROMPTS
) -> NodeCheck:
    """Check an idle engine under PipeMax; what fails is in the result. vLLM's own errors pass.

    With mixed batching it separates meanwhile: with two batches too few mixed steps would have prefetches to check.
    """
    begin_s = time.monotonic()
    figures: dict[str, float] = {}
    resize_gpu(engine, None)
    parts = [_check_copies(engine, figures)]
    resize_gpu(engine, None)  # the prefixes that the GPU's blocks held are gone
    with separated(engine, config):
        parts += _TokenCheck(engine, vllm_config, most_prompts).run(figures)
    return NodeCheck(
        device=device_name(),
        model=model_name(config),
        checked=f"{datetime.now(UTC):%Y-%m-%d} with PipeMax {__version__}, vLLM {vllm.__version__}, torch "
        f"{torch.__version__}",
        seconds=round(time.monotonic() - begin_s, 1),
        parts=tuple(parts),
        figures=figures,
    )


def _check_copies(engine: LLMEngine, figures: dict[str, float]) -> CheckPart:
    stages = check_copies(engine)
    for stage in stages:  # the slowest worker counts
        for name, rate in stage.bytes_per_s.items():
            figures[f"{name}, GB/s"] = round(min(rate / 1e9, figures.get(f"{name}, GB/s", rate)), 3)
    faults = [f"worker {number}: {fault}" for number, stage in enumerate(stages) for fault in stage.faults]
    if faults:
        return CheckPart(name="copies", passed=False, detail=", ".join(faults))
    first = stages[0]
    return CheckPart(
        name="copies",
        passed=True,
        detail=f"{first.num_blocks:,} blocks of {first.block_bytes:,} bytes on each of {len(stages)} workers: "
        + ", ".join(first.passed),
    )


class _TokenCheck:
    """Runs the same prompts with and without eviction."""

    def __init__(self, engine: LLMEngine, vllm_config: VllmConfig, most_prompts: int) -> None:
        self._engine = engine
        self._block_tokens = vllm_config.cache_config.block_size
        gpu_blocks = (vllm_config.cache_config.num_gpu_blocks or 1) - 1  # vLLM keeps one as its null block
        host_blocks = runtime_settings(vllm_config).host_blocks(self._block_tokens)
        self._room = min(int(_SHARE_OF_POOL * gpu_blocks), host_blocks)
        self._groups = block_tables(vllm_config)
        share = self._room * self._block_tokens // (2 * _FEWEST_PROMPTS * self._groups.count)
        longest = min(_MOST_TOKENS, vllm_config.model_config.max_model_len, share) - _OUTPUT_TOKENS
        self._prompts = self._draw(most_prompts, longest, vllm_config.model_config.get_vocab_size())
        self._num_runs = 0

    def run(self, figures: dict[str, float]) -> list[CheckPart]:
        if len(self._prompts) < _FEWEST_PROMPTS:
            detail = f"the KV pools hold only {len(self._prompts)} requests, too few to compare"
            return [CheckPart(name="tokens", passed=False, detail=detail)]
        half, few = ceil_div(len(self._prompts), 2), max(1, len(self._prompts) // _EVICTED_SHARE)
        reference = self._answer_in_groups(half)
        at_once, few_at_once = self._answer_in_groups(len(self._prompts)), self._answer_in_groups(few)
        tolerance = tolerance_of(reference, at_once, few_at_once)
        figures["tolerance of log probabilities"] = round(tolerance, 6)
        try:
            poison_prefetches(self._engine, is_on=True)
            poisoned = self._check(
                "tokens, prefetched over poison", reference, self._answer_evicted(), tolerance
            )
            poison_prefetches(self._engine, is_on=False)
            take_profile(self._engine)
            stalled_s = copy_counts(self._engine)["stall_s"]
            as_it_runs = self._check("tokens", reference, self._answer_evicted(), tolerance)
            overlap = self._overlap(stalled_s, figures)
        finally:
            poison_prefetches(self._engine, is_on=False)
            resize_gpu(self._engine, None)
        return [poisoned, as_it_runs, overlap]

    def _draw(self, most_prompts: int, longest: int, vocabulary: int) -> list[list[int]]:
        """Return random prompts, as many as the pools hold all at once."""
        rng, prompts, num_blocks = Random(0), list[list[int]](), 0
        for _ in range(most_prompts):
            num_tokens = rng.randint(max(1, longest // 6), max(1, longest))
            num_blocks += self._blocks(num_tokens)
            if num_blocks > self._room:
                break
            prompts.append(random_tokens(rng, num_tokens, vocabulary))
        return prompts

    def _blocks(self, prompt_tokens: int) -> int:
        num_tokens = prompt_tokens + _OUTPUT_TOKENS
        most = self._groups.prompt_blocks(num_tokens, self._block_tokens, in_flight_tokens=0)
        return most + self._groups.count

    def _answer_in_groups(self, size: int) -> list[Answer]:
        """Answer so many prompts at a time, with the whole pool and nothing cached."""
        resize_gpu(self._engine, None)
        answers: list[Answer] = []
        for begin in range(0, len(self._prompts), size):
            answers += self._answer(self._prompts[begin : begin + size])
        return answers

    def _answer_evicted(self) -> list[Answer]:
        """Answer through a sixth of the blocks that the prompts need, or little more than the longest takes."""
        needs = [self._blocks(len(prompt)) for prompt in self._prompts]
        resize_gpu(self._engine, max(sum(needs) // _EVICTED_SHARE, max(needs) + 2 * self._groups.count))
        return self._answer(self._prompts)

    def _answer(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        self._num_runs += 1
        sampling = SamplingParams(
            max_tokens=_OUTPUT_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=_LIKELIEST,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        ids = [f"check-{self._num_runs}-{place}" for place in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._engine.add_request(request_id, tokens_input([*prompt]), sampling)
        answers: dict[str, Answer] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                assert isinstance(output, RequestOutput), output
                if output.finished:
                    answers[output.request_id] = _as_answer(output)
        return [answers[request_id] for request_id in ids]

    def _check(
        self, name: str, reference: Sequence[Answer], answers: Sequence[Answer], tolerance: float
    ) -> CheckPart:
        counts = copy_counts(self._engine)
        moved = f"{counts['evictions']:.0f} evictions, {counts['prefetched_blocks']:.0f} blocks prefetched"
        if counts["prefetches"] < len(reference) // _PROMPTS_PER_PREFETCH:
            return CheckPart(name=name, passed=False, detail=f"too few requests left the GPU: {moved}")
        compared = compare(reference, answers, tolerance=tolerance)
        return CheckPart(
            name=name, passed=not compared.wrong, detail=f"{_describe(compared, len(reference))}; {moved}"
        )

    def _overlap(self, stalled_s: float, figures: dict[str, float]) -> CheckPart:
        stall_s = copy_counts(self._engine)["stall_s"] - stalled_s
        copies = take_profile(self._engine).copies
        copy_s = max(
            (sum(seconds) for seconds in zip(*(copy.stage_s for copy in copies), strict=True)), default=0.0
        )
        if copy_s == 0:
            return CheckPart(name="overlap", passed=False, detail="no prefetch was timed")
        hidden = max(0.0, 1 - stall_s / copy_s)
        figures["share of prefetch time hidden"] = round(hidden, 4)
        counts = hidden >= _LEAST_HIDDEN or current_platform.is_cpu()
        note = ", which a CPU's cores compute as well" if current_platform.is_cpu() else ""
        return CheckPart(
            name="overlap",
            passed=counts,
            detail=f"steps waited {stall_s:.3f} s for copies, of which prefetches took {copy_s:.3f} s{note}: "
            f"{hidden:.0%} hidden",
        )


def _describe(compared: Comparison, num_prompts: int) -> str:
    parts = [f"{compared.num_equal} of {num_prompts} prompts the same"]
    if compared.num_ties:
        parts.append(f"{compared.num_ties} part where two tokens are as likely")
    if compared.wrong:
        parts.append(f"{len(compared.wrong)} differ")
    return f"{', '.join(parts)} (log probabilities by up to {compared.max_difference:.2g})"


def _as_answer(output: RequestOutput) -> Answer:
    (sequence,) = output.outputs
    return Answer(
        tokens=tuple(sequence.token_ids),
        logprobs=tuple(
            {token: entry.logprob for token, entry in position.items()}
            for position in sequence.logprobs or ()
        ),
    )
