"""How PipeMax batches by simulations of a measured engine: candidates, and what is chosen."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.config import BatchingChoice
from pipemax.domain.plan import Batching
from pipemax.domain.step_times import Segment, StepTimeModel
from pipemax.policy.measured_choice import Rows, choose_batching, mixed_sizes
from pipemax.policy.row_sample import choose_batching_for
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.systems.continuous import VLLM_032_PP, ContinuousBatching
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import measured_scenario
from pipemax.sim.workloads import Workload
from tests.unit.policy.test_row_sample import engine, lengths

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
    sizes = mixed_sizes(tiled_engine())
    assert EDGE in sizes
    assert 512 not in sizes, "a token costs more there than at the edge"
    assert sizes == sorted(sizes)


def test_the_size_of_mixed_steps_is_the_fastest_by_simulation() -> None:
    choice = choose_batching(tiled_engine(), rows(), BatchingChoice.AUTO)
    assert (choice.batching, choice.mixed_step_tokens) == (Batching.MIXED, EDGE)
    assert choice.settings == {"batching": "mixed", "mixed_step_tokens": EDGE}
    phases = choose_batching(tiled_engine(), rows(), BatchingChoice.SEPARATED)
    assert choice.other_tokens_per_s == phases.tokens_per_s
    assert choice.tokens_per_s > phases.tokens_per_s
    assert choice.num_candidates == 1 + len(mixed_sizes(tiled_engine()))
    for size in (128, 2048):
        other = choose_batching(tiled_engine(), rows(), BatchingChoice.MIXED, size)
        assert other.tokens_per_s < choice.tokens_per_s


def test_the_engine_config_excludes_candidates() -> None:
    phases = choose_batching(tiled_engine(), rows(), BatchingChoice.SEPARATED)
    assert (phases.batching, phases.mixed_step_tokens) == (Batching.SEPARATED, None)
    assert phases.other_tokens_per_s is None
    fixed = choose_batching(tiled_engine(), rows(), BatchingChoice.MIXED, 512)
    assert (fixed.batching, fixed.mixed_step_tokens) == (Batching.MIXED, 512)


@pytest.mark.parametrize("system", ["pipemax", "vllm_032_pp"])
def test_a_simulation_that_stops_at_the_drain_has_the_steady_rate_of_the_whole_one(system: str) -> None:
    def run(*, stops_at_drain: bool) -> float:
        scenario = measured_scenario(tiled_engine(), rows().workload, stops_at_drain=stops_at_drain)
        simulation = (
            PipeMaxSystem(scenario) if system == "pipemax" else ContinuousBatching(scenario, VLLM_032_PP)
        )
        return simulation.simulate().steady_tokens_per_s

    assert run(stops_at_drain=True) == run(stops_at_drain=False)


@pytest.mark.parametrize("mixed_step_tokens", [None, 300])
def test_a_simulation_that_paused_ends_as_one_that_did_not(mixed_step_tokens: int | None) -> None:
    options = PipeMaxOptions(
        controller={} if mixed_step_tokens is None else mixed_batching(mixed_step_tokens)
    )
    scenario = measured_scenario(tiled_engine(), rows(400).workload)
    paused = PipeMaxSystem(scenario, options)
    rates = [paused.advance(share) for share in (0.1, 0.5)]
    whole, again = PipeMaxSystem(scenario, options).simulate(), paused.simulate()
    assert replace(again, recording=whole.recording) == whole
    assert again.recording.decode_samples == whole.recording.decode_samples
    assert len({*rates, whole.steady_tokens_per_s}) == 3


def test_mixed_steps_are_chosen_by_auto_only_where_the_length_of_outputs_is_known() -> None:
    known = lengths(prompt_tokens=[50, 150, 250], max_tokens=120, mean_output_tokens=60)
    guessed = lengths(prompt_tokens=[50, 150, 250], max_tokens=120)
    chosen = choose_batching_for(tiled_engine(), known, BatchingChoice.AUTO, None)
    assert chosen is not None
    assert chosen.batching is Batching.MIXED
    assert choose_batching_for(tiled_engine(), guessed, BatchingChoice.AUTO, None) is None
    asked_for = choose_batching_for(tiled_engine(), guessed, BatchingChoice.MIXED, None)
    assert asked_for is not None
    assert asked_for.batching is Batching.MIXED
