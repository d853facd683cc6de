"""Compare tokens of PipeMax with stock vLLM's, each by an engine of its own with the same random weights.

    stock vLLM      the prompts all at once, and a few at a time: the control
    PipeMax         the prompts with evictions, separated and, unless the config says separated, mixed; then with
                    prefetches of wrong blocks, which must be seen

The engines run under vLLM's batch-invariant kernels where there are any, so that tokens do not depend on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipemax.config import BatchingChoice, EngineConfig
from pipemax.domain.plan import Batching
from pipemax.domain.units import ceil_div
from pipemax.vllm_ext.core_calls import use_batching
from pipemax.vllm_ext.launch.known_check import TOKENS, CheckPart, Verdict
from pipemax.vllm_ext.node_check.prompts import (
    FEWEST_PROMPTS,
    Asking,
    KvPools,
    Prompt,
    draw_prompts,
    longest_prompt,
)
from pipemax.vllm_ext.node_check.verdicts import Run, tokens_part
from pipemax.vllm_ext.seam.vllm_types import LLMEngine, VllmConfig
from pipemax.vllm_ext.worker.copy_calls import swap_prefetches

_GROUPS = 5
"""Of the prompts, one after another in the control."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRuns:
    """What stock vLLM answers, in batches of two sizes."""

    prompts: Sequence[Prompt]
    controls: tuple[Run, Run]


def ask_stock(engine: LLMEngine, vllm_config: VllmConfig) -> StockRuns:
    """Have an idle engine under stock vLLM answer the prompts."""
    model = vllm_config.model_config
    prompts = draw_prompts(model.get_vocab_size(), longest_prompt(model.max_model_len))
    asking = Asking(engine, prompts)
    few = ceil_div(len(prompts), _GROUPS)
    return StockRuns(prompts=prompts, controls=(asking.in_groups(len(prompts)), asking.in_groups(few)))


def compare_with_stock(
    stock: StockRuns, engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig
) -> CheckPart:
    """Have an idle engine under PipeMax answer the prompts, and judge its tokens. It separates afterwards."""
    pools = KvPools(vllm_config)
    prompts = pools.fitting(stock.prompts)
    if len(prompts) < FEWEST_PROMPTS:
        detail = f"the KV pools hold only {len(prompts)} requests, too few to compare"
        return CheckPart(name=TOKENS, verdict=Verdict.INCONCLUSIVE, detail=detail)
    asking, num_blocks = Asking(engine, prompts), pools.evicting_blocks(prompts)
    runs: dict[str, Run] = {}
    if config.batching is not BatchingChoice.SEPARATED:
        use_batching(engine, Batching.MIXED, config.mixed_step_tokens)
        runs["mixed"] = asking.evicted(num_blocks, needs_prefetches=False)
    use_batching(engine, Batching.SEPARATED)
    runs["separated"] = asking.evicted(num_blocks)
    swap_prefetches(engine, is_on=True)
    try:
        faulty = asking.evicted(num_blocks)
    finally:
        swap_prefetches(engine, is_on=False)
    first, second = (Run(answers=control.answers[: len(prompts)]) for control in stock.controls)
    return tokens_part((first, second), runs, faulty)
