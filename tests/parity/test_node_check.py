"""The checks of a node, by real engines: right copies pass, damaged ones do not, and the engine is as before."""

from dataclasses import replace
from typing import Any

import pytest

from pipemax.config import EngineConfig
from pipemax.control.controller_config import StageConfig
from pipemax.domain.plan import StepPlan
from pipemax.vllm_ext.core_calls import fixed_times, recalibrate
from pipemax.vllm_ext.launch.forecast import runtime_settings
from pipemax.vllm_ext.launch.known_check import CheckPart, NodeCheck, Verdict
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from pipemax.vllm_ext.node_check.prompts import Asking, draw_prompts
from pipemax.vllm_ext.node_check.run import check_engine
from pipemax.vllm_ext.node_check.token_trial import ask_stock, compare_with_stock
from pipemax.vllm_ext.node_check.trial_config import trial_configs
from pipemax.vllm_ext.node_check.trial_process import compare_in_process
from pipemax.vllm_ext.worker.copy_calls import poison_prefetches
from tests.parity.batch_noise import sums_by_batch
from tests.parity.cases import BLOCK_TOKENS, PLAIN, VOCABULARY
from tests.parity.conftest import EngineOf, ModelOf, Reference
from tests.parity.engines import GPU_BLOCKS, STOCK, Kind, ParityEngine, Setting
from tests.parity.faulty_connector import Fault
from tests.parity.test_parity import V1_ASYNC, V1_PIPELINE, check

PARTS = ["copies", "poison"]
CONFIG = EngineConfig(model="varied-model")


def reset(engine: ParityEngine, fault: Fault) -> None:
    engine.reset(Setting(num_batches=2, gpu_blocks=GPU_BLOCKS - 1, host_blocks=300, fault=fault))


def checked(engine: ParityEngine, fault: Fault) -> NodeCheck:
    reset(engine, fault)
    return check_engine(engine.llm, engine.vllm_config, CONFIG, most_prompts=8)


def compared(engine: ParityEngine, *faults: Fault) -> list[CheckPart]:
    """The check of tokens with each of these faults, all sides by the same engine; stock vLLM is asked once."""
    engine.reset(STOCK)
    stock = ask_stock(engine.llm, engine.vllm_config)
    parts = []
    for fault in faults:
        reset(engine, fault)
        parts.append(compare_with_stock(stock, engine.llm, engine.vllm_config, CONFIG))
    return parts


@pytest.mark.parity_full  # tokens pass with right copies, below
@pytest.mark.parametrize("kind", [V1_PIPELINE, V1_ASYNC], ids=str)
def test_an_engine_with_right_copies_passes_and_answers_as_before(
    kind: Kind, engine_of: EngineOf, reference: Reference
) -> None:
    engine = engine_of(kind)
    result = checked(engine, Fault.NONE)
    assert result.verdict is Verdict.PASSED, result.parts
    assert [part.name for part in result.parts] == PARTS
    assert result.figures["prefetch, scattered blocks, GB/s"] > 0
    assert "share of prefetch time hidden" in result.figures
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == GPU_BLOCKS - 1, "all blocks are requests' again"
    check(engine, Setting(num_batches=3), PLAIN, reference(kind, PLAIN))


@pytest.mark.parity_full  # tokens fail with damaged copies, below
@pytest.mark.parametrize("kind", [V1_PIPELINE], ids=str)
def test_damaged_bytes_and_a_copy_that_is_left_out_over_poison_fail(kind: Kind, engine_of: EngineOf) -> None:
    result = checked(engine_of(kind), Fault.CORRUPT)
    assert result.parts[0].verdict is Verdict.FAILED
    assert result.refusal().startswith("this machine failed PipeMax's check (copies: worker 0: ")
    result = checked(engine_of(kind), Fault.LEFT_OUT)
    assert {part.verdict for part in result.parts} == {Verdict.FAILED}
    assert "of 8 prompts read KV that had not arrived (NaN)" in result.refusal()


class Plans:
    """A controller's plans, the requests named by the order in which they first ran."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self._names: dict[str, int] = {}

    def add(self, plan: StepPlan) -> None:
        if not plan.is_empty:
            moved = [
                (self._name(item.request_id), item.first_block, item.num_blocks) for item in plan.prefetch
            ]
            run = [self._name(name) for name in plan.run]
            self.plans.append((plan.phase, run, plan.run_tokens, [*map(self._name, plan.evict)], moved))

    def _name(self, request_id: str) -> int:
        return self._names.setdefault(request_id, len(self._names))


def _decode_s(stage: StageConfig) -> float:
    return stage.decode_time.seconds(2, 300)


@pytest.mark.parity_full  # the tokens are the same, below
@pytest.mark.parametrize("kind", [V1_PIPELINE, V1_ASYNC], ids=str)
def test_poison_changes_nothing_of_the_steps(kind: Kind, engine_of: EngineOf) -> None:
    engine = engine_of(kind)
    reset(engine, Fault.NONE)
    settings = runtime_settings(engine.vllm_config)
    asking = Asking(engine.llm, draw_prompts(VOCABULARY, 150, 8))
    # A link so slow that a few blocks a step are planned, and that measured times would change the plans.
    recalibrate(
        engine.llm,
        tuple(
            replace(stage, h2d_bytes_per_s=3 * stage.kv_bytes_per_token * BLOCK_TOKENS / _decode_s(stage))
            for stage in settings.stages
        ),
    )
    recorded: list[Plans] = []
    with fixed_times(engine.llm):
        for is_poisoned in (False, True):
            plans = Plans()
            engine.scheduler.on_plan = plans.add
            poison_prefetches(engine.llm, is_on=is_poisoned)
            asking.evicted(18)
            recorded.append(plans)
    engine.scheduler.on_plan = None
    poison_prefetches(engine.llm, is_on=False)
    plain, poisoned = (plans.plans for plans in recorded)
    assert any(moved for *_, moved in plain), "nothing was prefetched"
    assert plain == poisoned


@pytest.mark.parity_full  # a run of the engine for each of two batch sizes
@pytest.mark.parametrize("kind", [V1_PIPELINE], ids=str)
def test_sums_that_depend_on_the_batch_are_no_fault_of_the_machine(kind: Kind, engine_of: EngineOf) -> None:
    engine = engine_of(kind)
    with sums_by_batch(engine):
        result, (tokens,) = checked(engine, Fault.NONE), compared(engine, Fault.NONE)
    assert result.verdict is Verdict.PASSED, result.parts
    assert tokens.verdict is Verdict.INCONCLUSIVE
    assert "stock vLLM itself differs between two batch sizes" in tokens.detail


@pytest.mark.long  # two engines; damaged bytes fail above too
@pytest.mark.parametrize("kind", [V1_PIPELINE], ids=str)
def test_tokens_pass_with_right_copies_and_fail_with_damaged_ones(kind: Kind, engine_of: EngineOf) -> None:
    right, damaged = compared(engine_of(kind), Fault.NONE, Fault.CORRUPT)
    assert right.verdict is Verdict.PASSED, right.detail
    assert damaged.verdict is Verdict.FAILED, damaged.detail


@pytest.mark.parity_full  # a minute and a half
def test_two_engines_with_random_weights_in_a_process_of_their_own_answer_alike(model_of: ModelOf) -> None:
    config = EngineConfig.parse(
        {
            "model": model_of("llama"),
            "policy": "pipemax",
            "pipeline_parallel_size": 2,
            "max_model_len": 512,
            "block_size": 32,
            "cpu_kv_gib": 0.1,
        }
    )
    part = compare_in_process(trial_configs(config, make_vllm_config(config)))
    assert part.verdict is Verdict.PASSED, part.detail
    assert "24 of 24 prompts the same as stock vLLM's" in part.detail
