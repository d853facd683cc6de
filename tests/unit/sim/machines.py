"""A small node, model and workload that the simulator's tests share, and the systems that they run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from pipemax.domain.specs import ModelSpec, NodeSpec, Parallelism
from pipemax.presets import load_model, load_node, load_workload
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import STOCK_VLLM, VLLM_PP, VLLM_TP, ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload, draw_workload


def small_node(*, num_gpus: int = 4, host_gb: float = 64.0, kv_gb: float = 2.0) -> NodeSpec:
    """RTX 5090s that hold the first of ``num_gpus`` stages of ``small_model`` and ``kv_gb`` of its KV."""
    node, model = load_node("rtx5090x8"), small_model()
    first_layers = Parallelism(pipeline=num_gpus, tensor=1).layers_of(model)[0]
    weights = first_layers * model.layer_weight_bytes + model.head_weight_bytes
    memory = (weights + kv_gb * 1e9 + node.gpu_reserve_bytes) / node.gpu_memory_fraction
    return replace(
        node,
        name="small",
        num_gpus=num_gpus,
        host_memory_bytes=host_gb * 1e9,
        gpu=replace(node.gpu, memory_bytes=int(memory)),
    )


def small_model() -> ModelSpec:
    """LLaMA-2-70B with a quarter of its layers."""
    return replace(load_model("llama2-70b"), name="small", num_layers=20)


def small_workload(num_requests: int = 200, *, name: str = "sharegpt", seed: int = 0) -> Workload:
    """Outputs are cut at 300 tokens, which keeps the drain short."""
    drawn = draw_workload(load_workload(name), num_requests, np.random.default_rng(seed))
    return replace(drawn, output_tokens=np.minimum(drawn.output_tokens, 300))


def small_scenario(workload: Workload | None = None, node: NodeSpec | None = None) -> Scenario:
    return Scenario(node=node or small_node(), model=small_model(), workload=workload or small_workload())


def _pipemax(*, mixed: int | None = None, tensor: int = 1) -> Callable[[Scenario], PipeMaxSystem]:
    controller = {} if mixed is None else mixed_batching(mixed)
    return partial(PipeMaxSystem, options=PipeMaxOptions(controller=controller, tensor=tensor))


SYSTEMS: dict[str, Callable[[Scenario], ContinuousBatching | PipeMaxSystem]] = {
    "vllm_tp": partial(ContinuousBatching, policy=VLLM_TP),
    "vllm_pp": partial(ContinuousBatching, policy=VLLM_PP),
    "vllm_032_pp": partial(ContinuousBatching, policy=STOCK_VLLM),
    "vllm_032_pp_512": partial(ContinuousBatching, policy=stock_vllm(512, name="vllm_032_pp_512")),
    "vllm_032_balanced_512": partial(
        ContinuousBatching, policy=stock_vllm(512, balances_decodes=True, name="vllm_032_balanced_512")
    ),
    "vllm_032_t2p2_512": partial(
        ContinuousBatching, policy=stock_vllm(512, tensor=2, name="vllm_032_t2p2_512")
    ),
    "pipemax": _pipemax(),
    "pipemax_mixed_256": _pipemax(mixed=256),
    "pipemax_mixed_512": _pipemax(mixed=512),
    "pipemax_mixed_2048": _pipemax(mixed=2048),
    "pipemax_t2p2": _pipemax(tensor=2),
    "pipemax_t2p2_mixed_512": _pipemax(mixed=512, tensor=2),
}


def simulate(name: str, scenario: Scenario) -> SimulationResult:
    return SYSTEMS[name](scenario).simulate()
