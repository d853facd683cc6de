"""The layout that is chosen, against every layout's own simulation."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.config import Policy
from pipemax.domain.hardware import AllReduceSpec
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.domain.tuned import STOCK_ENOUGH_OUTPUTS
from pipemax.policy import layout_choice
from pipemax.policy.layout_choice import FixedLayout, LayoutChoice, choose_layout
from pipemax.policy.layout_runs import (
    ALL_SIZES,
    LayoutRun,
    capacity_of,
    engine_scenario,
    pipemax_estimate,
    run_pipemax,
    run_stock,
)
from pipemax.policy.layouts import Layout, layout_refusal, possible_layouts
from pipemax.presets import load_workload
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload, draw_workload, grain_of
from tests.unit.sim.machines import small_model, small_node

SAMPLE = draw_workload(load_workload("sharegpt"), 120, np.random.default_rng(0))
ANY = FixedLayout()


def chosen_on(node: NodeSpec, *, fixed: FixedLayout = ANY, policy: Policy = Policy.AUTO) -> LayoutChoice:
    return choose_layout(node, small_model(), SAMPLE, fixed=fixed, policy=policy)


def scenario_of(node: NodeSpec, layout: Layout, sample: Workload = SAMPLE) -> Scenario:
    """Return what the choice simulates of a layout where stock vLLM may be the fastest."""
    grain = grain_of(sample, BLOCK_TOKENS, enough_outputs=STOCK_ENOUGH_OUTPUTS)
    return engine_scenario(node, small_model(), layout, sample, stops_at_drain=True, grain=grain)


def test_the_fastest_of_all_layouts_is_chosen_and_the_second_is_named() -> None:
    node = small_node(num_gpus=4, kv_gb=12.0)
    choice = chosen_on(node, policy=Policy.VLLM)
    rates = {
        layout: run_stock(scenario_of(node, layout), layout).tokens_per_s
        for layout in possible_layouts(node)
        if str(layout) not in " ".join(choice.not_possible)
    }
    by_speed = sorted(rates, key=lambda layout: -rates[layout])
    assert choice.best is not None
    assert choice.second is not None
    assert [choice.layout, choice.second.layout] == by_speed[:2]
    assert choice.reason.startswith(
        f"{choice.layout}: simulated {rates[choice.layout]:,.0f} tokens/s (stock vLLM"
    )
    assert f"second {by_speed[1]}" in choice.reason


def test_stock_vllm_is_chosen_by_a_run_of_all_rows_token_by_token() -> None:
    """In grains it is preempted less: on L20s, 70B over eight stages made 1.08 times its rate."""
    choice = chosen_on(small_node(num_gpus=2, kv_gb=12.0), policy=Policy.VLLM)
    assert choice.best is not None
    assert choice.second is not None
    assert not choice.best.is_bound
    assert choice.best.result.prompt_tokens == SAMPLE.prompt_tokens.sum()
    assert choice.second.is_bound, "a run of few rows was enough to leave this one out"
    assert "with at most" in choice.reason


def test_a_choice_simulates_less_than_half_of_the_steps_of_all_candidates() -> None:
    node, steps = small_node(num_gpus=4, kv_gb=0.8), list[int]()
    choice = choose_layout(node, small_model(), SAMPLE, fixed=ANY, on_step=steps.append)
    in_choice, rates = len(steps), dict[str, float]()
    for layout in possible_layouts(node):
        if layout_refusal(node, small_model(), layout) is None:
            scenario = replace(scenario_of(node, layout), on_progress=steps.append)
            runs = [run_stock(scenario, layout), *run_pipemax(scenario, layout, ALL_SIZES.mixed[-1:])]
            rates |= {f"{run.layout} {run}": run.tokens_per_s for run in runs}
    assert 0 < in_choice < 0.5 * (len(steps) - in_choice)
    assert choice.best is not None
    assert choice.best.tokens_per_s > 0.97 * max(rates.values()), rates


def test_the_replicas_share_a_short_table_and_its_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows do not fill two engines: one over all GPUs ends sooner. Two make more of a long table."""
    reduces = AllReduceSpec(bus_bytes_per_s=5e9, latency_s=1e-5)
    node, table = replace(small_node(num_gpus=4, kv_gb=12.0), all_reduce=reduces), SAMPLE.first(16)

    def choice(*, is_whole_table: bool) -> LayoutChoice:
        return choose_layout(node, small_model(), table, fixed=ANY, is_whole_table=is_whole_table)

    short, long = choice(is_whole_table=True), choice(is_whole_table=False)
    assert short.best is not None
    assert short.layout.replicas == 1
    assert long.layout.replicas == 2
    monkeypatch.setattr(layout_choice, "LAYOUT_WHOLE_TOKENS", table.total_tokens - 1)
    assert choice(is_whole_table=True).layout == long.layout, "a table of many tokens would take too long"

    def rate(layout: Layout) -> float:
        share = replace(scenario_of(node, layout, table.first(16 // layout.replicas)), stops_at_drain=False)
        return layout.replicas * max(
            ContinuousBatching(share, stock_vllm(size, tensor=layout.tensor_parallel))
            .simulate()
            .total_tokens_per_s
            for size in ALL_SIZES.stock
        )

    assert short.best.tokens_per_s == pytest.approx(rate(short.layout), rel=1e-3)
    assert rate(short.layout) > rate(long.layout)


def test_a_fast_all_reduce_makes_tensor_parallelism_win() -> None:
    slow = small_node(num_gpus=4, kv_gb=2.0)
    slow = replace(slow, all_reduce=AllReduceSpec(bus_bytes_per_s=1e9, latency_s=1e-3))
    fast = replace(slow, all_reduce=AllReduceSpec(bus_bytes_per_s=1e15, latency_s=0.0))
    one_engine = FixedLayout(replicas=1)
    assert chosen_on(slow, fixed=one_engine, policy=Policy.VLLM).layout.tensor_parallel == 1
    assert chosen_on(fast, fixed=one_engine, policy=Policy.VLLM).layout.tensor_parallel == 4


def test_what_the_config_fixes_is_kept() -> None:
    node = small_node(num_gpus=4, kv_gb=12.0)
    for layout in possible_layouts(node):
        fixed = FixedLayout(
            replicas=layout.replicas,
            tensor_parallel=layout.tensor_parallel,
            pipeline_parallel=layout.pipeline_parallel,
        )
        if layout_refusal(node, small_model(), layout) is not None:
            with pytest.raises(ValueError, match=f"no layout of small runs small: {layout}: "):
                chosen_on(node, fixed=fixed)
            continue
        choice = chosen_on(node, fixed=fixed)
        assert choice.layout == layout
        assert choice.best is None, "nothing is simulated where nothing is open"
    assert chosen_on(node, fixed=FixedLayout(pipeline_parallel=2)).layout.pipeline_parallel == 2


def test_one_gpu_has_one_layout() -> None:
    choice = chosen_on(small_node(num_gpus=1, kv_gb=12.0))
    assert choice.layout == Layout(replicas=1, tensor_parallel=1, pipeline_parallel=1)
    assert choice.reason == "1 × tp 1 × pp 1: the only layout possible"


@pytest.mark.long  # simulation
@pytest.mark.parametrize(("bus_bytes_per_s", "is_pipemax"), [(1e9, True), (1e15, False)])
def test_the_faster_of_both_policies_is_chosen(bus_bytes_per_s: float, *, is_pipemax: bool) -> None:
    """On GPUs with little memory: a slow all-reduce leaves pipelines, a fast one makes stock vLLM's latency short."""
    reduces = AllReduceSpec(bus_bytes_per_s=bus_bytes_per_s, latency_s=0.0)
    node = replace(small_node(num_gpus=4, kv_gb=0.3), all_reduce=reduces)
    stock = chosen_on(node, policy=Policy.VLLM).best
    pipemax = chosen_on(node, policy=Policy.PIPEMAX).best
    assert stock is not None
    assert pipemax is not None
    assert (pipemax.tokens_per_s > stock.tokens_per_s) is is_pipemax
    assert chosen_on(node).best == (pipemax if is_pipemax else stock)


def test_stock_vllm_runs_in_its_own_best_layout_where_pipemax_gains_one_percent() -> None:
    """An all-reduce is found with which tensor parallelism is 1 % slower than PipeMax over stages, and then 4 %."""
    plain, sample = small_node(num_gpus=2, kv_gb=0.3), SAMPLE.first(60)
    tensor = Layout(replicas=1, tensor_parallel=2, pipeline_parallel=1)
    one_engine = FixedLayout(replicas=1)

    def node_of(bus_bytes_per_s: float) -> NodeSpec:
        return replace(plain, all_reduce=AllReduceSpec(bus_bytes_per_s=bus_bytes_per_s, latency_s=0.0))

    def choice_on(bus_bytes_per_s: float, policy: Policy = Policy.AUTO) -> LayoutRun:
        node = node_of(bus_bytes_per_s)
        best = choose_layout(node, small_model(), sample, fixed=one_engine, policy=policy).best
        assert best is not None
        return best

    def stock_rate(bus_bytes_per_s: float) -> float:
        scenario = scenario_of(node_of(bus_bytes_per_s), tensor, sample)
        return run_stock(scenario, tensor).tokens_per_s

    pipemax = choice_on(1e9, Policy.PIPEMAX)

    def bus_for(gain: float) -> float:
        low, high = 1e8, 1e12
        for _ in range(12):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if pipemax.tokens_per_s > gain * stock_rate(middle) else (low, middle)
        return low

    assert (choice_on(bus_for(1.01)).layout, choice_on(bus_for(1.04)).layout) == (tensor, pipemax.layout)


@pytest.mark.long  # simulation
def test_estimates_hide_no_layout_in_which_pipemax_is_fastest() -> None:
    node = small_node(num_gpus=4, kv_gb=0.8)
    choice = chosen_on(node, policy=Policy.PIPEMAX)
    rates: dict[Layout, float] = {}
    for layout in possible_layouts(node):
        if layout_refusal(node, small_model(), layout) is not None:
            continue
        scenario = engine_scenario(node, small_model(), layout, SAMPLE, stops_at_drain=True)
        estimate = pipemax_estimate(scenario, layout)
        runs = run_pipemax(scenario, layout, ALL_SIZES.mixed[-1:])
        assert (estimate is None) == (layout.pipeline_parallel == 1) == (not runs)
        for run in runs:
            assert estimate is not None
            assert 0.6 * estimate <= run.tokens_per_s <= 1.2 * estimate, f"{run} in {layout}"
            rates[layout] = max(rates.get(layout, 0.0), run.tokens_per_s)
    assert rates[choice.layout] >= 0.99 * max(rates.values()), rates


def test_waves_are_simulated_where_the_engine_would_accept_them() -> None:
    """With the KV of all layers kept, and over two stages or more."""
    node = small_node(num_gpus=2, kv_gb=0.4)
    layout = Layout(replicas=1, tensor_parallel=1, pipeline_parallel=2)
    scenario = engine_scenario(node, small_model(), layout, SAMPLE, stops_at_drain=True)
    without, waves = (
        run_pipemax(scenario, layout, (256,), always_in_phases=False, has_waves=has_waves)[-1]
        for has_waves in (False, True)
    )
    assert waves.result.mean_decode_batch > 1.05 * without.result.mean_decode_batch
    link = replace(node.link, host_to_gpu_bytes_per_s=node.link.host_to_gpu_bytes_per_s / 8)
    few_copies = replace(scenario, node=replace(node, link=link))
    estimates = [
        pipemax_estimate(few_copies, layout, has_waves=has_waves) or 0.0 for has_waves in (False, True)
    ]
    assert estimates[1] > 1.02 * estimates[0] > 0
    windows = engine_scenario(small_node(num_gpus=2, kv_gb=4.0), windowed_model(), layout, SAMPLE.first(20))
    assert run_pipemax(windows, layout, (256,), always_in_phases=False, frees_windows=True) != []
    assert run_pipemax(windows, layout, (256,), frees_windows=True, has_waves=True) == []
    whole = replace(layout, tensor_parallel=2, pipeline_parallel=1)
    assert run_pipemax(scenario, whole, (256,), has_waves=True) == []


@pytest.mark.long  # simulation
def test_mixed_steps_have_the_faster_of_their_sizes() -> None:
    node = small_node(num_gpus=4, kv_gb=0.8)
    layout = Layout(replicas=1, tensor_parallel=1, pipeline_parallel=4)
    scenario = engine_scenario(node, small_model(), layout, SAMPLE, stops_at_drain=True)
    rates = {size: run_pipemax(scenario, layout, [size])[1].tokens_per_s for size in ALL_SIZES.mixed}
    assert len({*rates.values()}) == 2
    assert run_pipemax(scenario, layout)[1].chunk_tokens == max(rates, key=rates.__getitem__)


def test_a_layout_without_room_for_one_request_is_left_out() -> None:
    node, longest = small_node(num_gpus=4, kv_gb=12.0), 100_000  # engines of two GPUs hold 84,064 tokens
    choice = choose_layout(node, small_model(), SAMPLE, fixed=ANY, policy=Policy.VLLM, max_model_len=longest)
    assert choice.layout.replicas == 1
    left_out = [why for why in choice.not_possible if why.startswith("2 × tp 1 × pp 2: ")]
    assert left_out == [
        "2 × tp 1 × pp 2: an engine's KV cache has room for 84,064 tokens, and one request may have 100,000 "
        "(max_model_len)"
    ]


def test_a_layout_that_gpus_cannot_make_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"no layout of .* runs .*: none of 4 GPUs fits pipeline_parallel_size 3"
    ):
        chosen_on(small_node(num_gpus=4, kv_gb=12.0), fixed=FixedLayout(pipeline_parallel=3))


def windowed_model() -> ModelSpec:
    """Five of six layers attend to 64 tokens."""
    return replace(small_model(), num_layers=24, window_tokens=64, full_layers=(5, 11, 17, 23))


def test_stock_vllm_holds_more_rows_of_a_model_with_windows() -> None:
    node = small_node(num_gpus=4, kv_gb=2.0)
    layout = Layout(replicas=1, tensor_parallel=1, pipeline_parallel=4)
    scenario = engine_scenario(node, windowed_model(), layout, SAMPLE)
    freed = run_stock(scenario, layout)
    kept = ContinuousBatching(
        scenario, replace(stock_vllm(freed.chunk_tokens, max_num_seqs=1024), frees_windows=False)
    ).simulate()
    assert freed.result.mean_decode_batch > 1.3 * kept.mean_decode_batch
    assert freed.result.steady_tokens_per_s > 1.1 * kept.steady_tokens_per_s


def test_rows_that_fit_only_if_windows_are_freed_need_stock_vllm() -> None:
    node, model = small_node(num_gpus=4, kv_gb=4.0), windowed_model()
    layout = Layout(replicas=1, tensor_parallel=1, pipeline_parallel=4)
    longest = capacity_of(node, model, layout).gpu_tokens + 1
    assert layout_refusal(node, model, layout, longest_request=longest) is None
    refusal = layout_refusal(node, model, layout, longest_request=longest, keeps_windows=True)
    assert refusal is not None
    assert f"one request may have {longest:,}" in refusal
    long_row = Workload(
        name="long",
        prompt_tokens=np.array([longest - 5]),
        output_tokens=np.array([5]),
        shared_prefix_tokens=0,
    )
    scenario = Scenario(node=node, model=model, workload=long_row)
    assert run_pipemax(scenario, layout) == []
    assert run_pipemax(scenario, layout, frees_windows=True) != []


@pytest.mark.long  # simulation
def test_the_choice_simulates_pipemax_with_freed_windows_where_its_engines_free_them() -> None:
    node = small_node(num_gpus=2, kv_gb=4.0)
    kept, freed = (
        choose_layout(
            node, windowed_model(), SAMPLE, fixed=ANY, policy=Policy.PIPEMAX, frees_windows=frees
        ).best
        for frees in (False, None)
    )
    assert kept is not None
    assert freed is not None
    assert freed.tokens_per_s > 1.1 * kept.tokens_per_s


@pytest.mark.long  # simulation
def test_windows_that_hold_most_of_a_row_are_freed_only_if_the_config_says_so() -> None:
    node = small_node(num_gpus=2, kv_gb=4.0)
    model = replace(windowed_model(), window_tokens=2_000)
    layout = Layout(replicas=1, tensor_parallel=1, pipeline_parallel=2)
    scenario = engine_scenario(node, model, layout, SAMPLE.first(60))
    kept, freed, told = (
        run_pipemax(scenario, layout, (512,), always_in_phases=False, frees_windows=one)[-1].tokens_per_s
        for one in (False, None, True)
    )
    assert freed == kept
    assert told != kept
