"""Check an engine under PipeMax on the machine that it runs on, before it is given any row.

    copies      known bytes through every lane of every worker, compared byte for byte
    poison      prompts through a GPU pool so small that their KV has to leave it and come back: the same steps twice,
                and again with poison under every prefetch. The batches are the same, so the tokens are

Tokens of different batches are compared by ``token_trial``. The share of the prefetches' time that steps did not wait
for is a figure of the report. The engine must have nothing else to do. Its pools are overwritten, and it is left empty.
"""

import logging
import time
from datetime import UTC, datetime

import torch

from pipemax import __version__
from pipemax.config import EngineConfig, Policy
from pipemax.domain.errors import EngineStartError
from pipemax.vllm_ext.core_calls import copy_counts, fixed_times, resize_gpu, separated, take_profile
from pipemax.vllm_ext.launch.known_calibration import device_name, model_name
from pipemax.vllm_ext.launch.known_check import (
    CheckPart,
    NodeCheck,
    Verdict,
    check_path,
    keep_check,
    kept_check,
    kept_tokens,
)
from pipemax.vllm_ext.node_check.prompts import (
    FEWEST_PROMPTS,
    MOST_PROMPTS,
    Asking,
    KvPools,
    draw_prompts,
    longest_prompt,
)
from pipemax.vllm_ext.node_check.verdicts import POISON, poison_part
from pipemax.vllm_ext.seam.vllm_types import VLLM_VERSION, LLMEngine, VllmConfig
from pipemax.vllm_ext.worker.copy_calls import check_copies, poison_prefetches

log = logging.getLogger(__name__)


def check_at_start(engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig) -> NodeCheck | None:
    """Check an engine that has just started, unless this machine is known under it; return what is known then.

    None if nothing is checked. ``EngineStartError`` if the check fails, or has failed before.
    """
    if config.policy is not Policy.PIPEMAX or not config.check_at_start:
        return None
    check = kept_check(config, vllm_config)
    if check is None:
        log.info("nothing is known of PipeMax on this machine: checking copies, and prefetches over poison")
        check = check_engine(engine, vllm_config, config)
        keep_check(check_path(config, vllm_config), check)
        for part in check.parts:
            log.info("%s %s: %s", part.verdict, part.name, part.detail)
    check = check.joined(kept_tokens(vllm_config))
    if refusal := check.refusal():
        raise EngineStartError(f"{refusal}, policy: vllm runs without what failed")
    if warning := check.warning():
        log.warning("%s; policy pipemax runs all the same", warning)
    return check


def check_engine(
    engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig, *, most_prompts: int = MOST_PROMPTS
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
        parts.append(_check_over_poison(engine, vllm_config, most_prompts, figures))
    return new_check(vllm_config, model_name(config), begin_s, parts, figures)


def new_check(
    vllm_config: VllmConfig, model: str, begin_s: float, parts: list[CheckPart], figures: dict[str, float]
) -> NodeCheck:
    """Return a check of this machine that was made now, since ``begin_s`` of the monotonic clock."""
    return NodeCheck(
        device=device_name(),
        model=model,
        checked=f"{datetime.now(UTC):%Y-%m-%d} with PipeMax {__version__}, vLLM {VLLM_VERSION}, torch "
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
        return CheckPart(name="copies", verdict=Verdict.FAILED, detail=", ".join(faults))
    first = stages[0]
    return CheckPart(
        name="copies",
        verdict=Verdict.PASSED,
        detail=f"{first.num_blocks:,} blocks of {first.block_bytes:,} bytes on each of {len(stages)} workers: "
        + ", ".join(first.passed),
    )


def _check_over_poison(
    engine: LLMEngine, vllm_config: VllmConfig, most_prompts: int, figures: dict[str, float]
) -> CheckPart:
    pools, model = KvPools(vllm_config), vllm_config.model_config
    longest = min(longest_prompt(model.max_model_len), pools.longest_prompt)
    prompts = pools.fitting(draw_prompts(model.get_vocab_size(), longest, most_prompts))
    if len(prompts) < FEWEST_PROMPTS:
        detail = f"the KV pools hold only {len(prompts)} requests, too few to compare"
        return CheckPart(name=POISON, verdict=Verdict.INCONCLUSIVE, detail=detail)
    asking, num_blocks = Asking(engine, prompts), pools.evicting_blocks(prompts)
    try:
        # As the engine will run. The estimates of step times, which the steps below keep, settle meanwhile.
        take_profile(engine)
        stalled_s = copy_counts(engine)["stall_s"]
        asking.evicted(num_blocks)
        _note_overlap(engine, stalled_s, figures)
        with fixed_times(engine):
            controls = asking.evicted(num_blocks), asking.evicted(num_blocks)
            poison_prefetches(engine, is_on=True)
            poisoned = asking.evicted(num_blocks)
    finally:
        poison_prefetches(engine, is_on=False)
        resize_gpu(engine, None)
    return poison_part(controls, poisoned)


def _note_overlap(engine: LLMEngine, stalled_s: float, figures: dict[str, float]) -> None:
    """Note the share of the prefetches' time that steps did not wait for, if a prefetch was timed.

    On a GPU copies have engines of their own; on a CPU they share the cores with the model.
    """
    stall_s = copy_counts(engine)["stall_s"] - stalled_s
    copies = take_profile(engine).copies
    copy_s = max(
        (sum(seconds) for seconds in zip(*(copy.stage_s for copy in copies), strict=True)), default=0.0
    )
    if copy_s > 0:
        figures["share of prefetch time hidden"] = round(max(0.0, 1 - stall_s / copy_s), 4)
