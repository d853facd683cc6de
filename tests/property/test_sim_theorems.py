"""The paper's appendix as properties of the simulator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.domain.specs import Parallelism, kv_capacity
from pipemax.presets import load_model, load_node
from pipemax.sim.event_queue import EventQueue
from pipemax.sim.pipeline import Pipeline, Step, StepKind

times_s = st.lists(st.floats(1e-3, 10.0, allow_nan=False), min_size=1, max_size=60)


def makespan_s(step_s: list[float], num_stages: int) -> float:
    """Independent prompts, all submitted at the start, on a homogeneous pipeline."""
    queue, ends = EventQueue(), list[float]()
    pipeline = Pipeline(queue, num_stages, send=lambda stage, num_bytes: 0.0)
    for seconds in step_s:
        pipeline.submit(
            Step(
                kind=StepKind.PREFILL,
                stage_s=[seconds] * num_stages,
                activation_bytes=0.0,
                on_done=lambda step: ends.append(queue.now_s()),
                batch=0,
                tokens=1,
            )
        )
    queue.run()
    assert len(ends) == len(step_s)
    return ends[-1]


@given(step_s=times_s, num_stages=st.integers(1, 16))
def test_prefill_takes_the_sum_and_n_minus_one_longest(step_s: list[float], num_stages: int) -> None:
    """``thm:prefill-time``: T(m, n) = Σ t_i + (n − 1) · max t_i."""
    assert makespan_s(step_s, num_stages) == pytest.approx(sum(step_s) + (num_stages - 1) * max(step_s))


@given(step_s=times_s, num_stages=st.integers(1, 8))
def test_order_of_prompts_does_not_change_the_makespan(step_s: list[float], num_stages: int) -> None:
    assert makespan_s(step_s, num_stages) == pytest.approx(makespan_s(step_s[::-1], num_stages))


@pytest.mark.parametrize("node_name", ["rtx5090x8", "l20x8", "h100x8"])
@pytest.mark.parametrize("model_name", ["llama2-70b", "mixtral-8x7b", "qwen3-32b"])
def test_token_budget_of_a_batch(node_name: str, model_name: str) -> None:
    """``equation: memory``: (M − W/n) / T tokens for each of n batches. M is what the engine may use."""
    node, model = load_node(node_name), load_model(model_name)
    n = node.num_gpus
    capacity = kv_capacity(node, model, Parallelism(pipeline=n, tensor=1))
    usable = node.gpu.memory_bytes * node.gpu_memory_fraction - node.gpu_reserve_bytes
    budget = (usable - model.weight_bytes / n) / model.kv_bytes_per_token
    # The first and the last stage hold an embedding each, which the derivation spreads evenly.
    assert capacity.gpu_tokens / n == pytest.approx(budget, rel=0.08)
    assert capacity.gpu_tokens / n <= budget * 1.001
