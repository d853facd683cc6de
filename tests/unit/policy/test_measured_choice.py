"""How PipeMax batches by simulations of a measured engine: candidates, and what is chosen."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.config import BatchingChoice
from pipemax.domain.plan import Batching
from pipemax.domain.step_times import Segment, StepTimeModel
from pipemax.policy.compare import ChosenPolicy, verdict
from pipemax.policy.measured_choice import (
    Rows,
    batching_plans,
    cheapest_size,
    choose_batching,
    compare_policies,
)
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.systems.continuous import STOCK_VLLM, ContinuousBatching
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.scenario import measured_scenario
from pipemax.sim.workloads import Workload
from tests.unit.policy.test_row_sample import engine

EDGE = 300
STAIRS = StepTimeModel(
    segments=(
        Segment(min_size=1, alpha_s=5e-6, delta_s=5e-3),
        Segment(min_size=EDGE + 1, alpha_s=20e-6, delta_s=9e-3),
    ),
    beta_s=1e-9,
)


def tiled_engine() -> MeasuredEngine:
    """Steps that cost little up to the edge of a tile, and much more from there on."""
    plain = engine(stages=4, gpu_blocks=2_000)
    stage = replace(plain.stages[0], decode_time=STAIRS, prefill_time=replace(STAIRS, beta_s=1e-10))
    return replace(plain, stages=(stage,) * 4, max_batched_tokens=2048)


def smooth_engine() -> MeasuredEngine:
    return replace(engine(stages=4, gpu_blocks=2_000), max_batched_tokens=2048)


def rows(count: int = 1_500) -> Rows:
    rng = np.random.default_rng(0)
    workload = Workload(
        name="rows",
        prompt_tokens=rng.integers(50, 250, count),
        output_tokens=rng.integers(1, 120, count),
        shared_prefix_tokens=0,
    )
    return Rows(workload=workload, is_whole_table=False)


def test_mixed_steps_end_at_the_edge_of_a_tile_and_never_just_behind_it() -> None:
    assert cheapest_size(tiled_engine(), 512) == EDGE
    assert cheapest_size(tiled_engine(), 2048) == EDGE
    assert cheapest_size(tiled_engine(), 250) == 250
    linear = engine(stages=4, gpu_blocks=2_000)
    assert cheapest_size(linear, 2048) == linear.max_batched_tokens == 512


def test_a_short_table_is_simulated_with_three_sizes_and_in_phases() -> None:
    plans = batching_plans(smooth_engine(), replace(rows(), is_whole_table=True), BatchingChoice.AUTO)
    assert [plan.mixed_step_tokens for plan in plans] == [128, 512, 2048, None]


def test_a_long_table_has_mixed_steps_in_any_case() -> None:
    """Of the largest size where the lengths of outputs are a guess."""
    known = batching_plans(smooth_engine(), rows(), BatchingChoice.AUTO)
    assert [plan.mixed_step_tokens for plan in known] == [512, 2048]
    guessed = batching_plans(smooth_engine(), replace(rows(), outputs_are_known=False), BatchingChoice.AUTO)
    assert [plan.mixed_step_tokens for plan in guessed] == [2048]


def test_phases_are_considered_where_the_gpus_hold_few_rows() -> None:
    """As they do in simulation: the choice among few short ones is worth more than full steps."""
    few = engine(stages=4, gpu_blocks=120)
    plans = batching_plans(few, rows(), BatchingChoice.AUTO)
    assert [plan.batching for plan in plans] == [Batching.MIXED, Batching.SEPARATED]


@pytest.mark.long  # simulation; test_layout_choice has it of layouts
def test_the_fastest_in_simulation_is_chosen() -> None:
    whole = replace(rows(), is_whole_table=True)
    plans = batching_plans(smooth_engine(), whole, BatchingChoice.AUTO)
    rates = {
        plan: choose_rate(whole, BatchingChoice(plan.batching.value), plan.mixed_step_tokens)
        for plan in plans
    }
    assert choose_batching(smooth_engine(), whole, BatchingChoice.AUTO) == max(rates, key=rates.__getitem__)


def choose_rate(of: Rows, batching: BatchingChoice, mixed_step_tokens: int | None) -> float:
    """Return the simulated rate of one way to batch, by the comparison with stock vLLM."""
    choice = compare_policies(
        smooth_engine(), of, inputs={}, batching=batching, mixed_step_tokens=mixed_step_tokens
    )
    return choice.predicted_tokens_per_s[ChosenPolicy.PIPEMAX]


def test_the_engine_config_excludes_candidates() -> None:
    phases = choose_batching(tiled_engine(), rows(), BatchingChoice.SEPARATED)
    assert (phases.batching, phases.mixed_step_tokens) == (Batching.SEPARATED, None)
    assert phases.settings == {"batching": "separated"}
    fixed = choose_batching(tiled_engine(), rows(), BatchingChoice.MIXED, 512)
    assert (fixed.batching, fixed.mixed_step_tokens) == (Batching.MIXED, 512)
    assert fixed.settings == {"batching": "mixed", "mixed_step_tokens": 512}


@pytest.mark.parametrize(
    ("speedup", "changes", "chosen"),
    [
        (1.01, {"is_whole_table": True}, ChosenPolicy.VLLM),
        (1.03, {"is_whole_table": True}, ChosenPolicy.PIPEMAX),
        (1.0, {}, ChosenPolicy.PIPEMAX),
        (0.98, {}, ChosenPolicy.VLLM),
        (0.92, {"outputs_are_known": False}, ChosenPolicy.PIPEMAX),
        (0.88, {"outputs_are_known": False}, ChosenPolicy.VLLM),
    ],
)
def test_the_less_the_simulated_rows_are_the_table_s_the_more_stock_vllm_must_gain(
    speedup: float, changes: dict[str, bool], chosen: ChosenPolicy
) -> None:
    assert verdict(speedup, replace(rows(), **changes).least_gain())[0] is chosen


def test_with_step_times_that_are_a_guess_pipemax_must_gain_three_tenths() -> None:
    for changes in ({}, {"is_whole_table": True}, {"outputs_are_known": False}):
        least = replace(rows(), **changes).least_gain(times_are_a_guess=True)
        assert verdict(1.29, least)[0] is ChosenPolicy.VLLM
        assert verdict(1.31, least)[0] is ChosenPolicy.PIPEMAX


def test_the_choice_says_that_its_step_times_are_a_guess() -> None:
    guessed = replace(smooth_engine(), times_are_a_guess=True)
    choices = [compare_policies(of, rows(300), inputs={}) for of in (smooth_engine(), guessed)]
    assert ["that are a guess" in choice.reason for choice in choices] == [False, True]


@pytest.mark.long  # simulation
@pytest.mark.parametrize("system", ["pipemax", "vllm_032_pp"])
def test_a_simulation_that_stops_at_the_drain_has_the_steady_rate_of_the_whole_one(system: str) -> None:
    def run(*, stops_at_drain: bool) -> float:
        scenario = measured_scenario(tiled_engine(), rows().workload, stops_at_drain=stops_at_drain)
        simulation = (
            PipeMaxSystem(scenario) if system == "pipemax" else ContinuousBatching(scenario, STOCK_VLLM)
        )
        return simulation.simulate().steady_tokens_per_s

    assert run(stops_at_drain=True) == run(stops_at_drain=False)
