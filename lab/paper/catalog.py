"""All systems by the names that the command line and the plots use."""

from dataclasses import replace
from functools import partial

from lab.paper.ablations import LayerFirstSystem, NoActivationPrioritySystem, StaticPrefetchSystem
from lab.paper.offload import Offloading
from lab.paper.seesaw import Seesaw
from lab.paper.tdpipe import TdPipe, simulate_tuned
from pipemax.domain.specs import NodeSpec, Parallelism
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import STOCK_VLLM, VLLM_PP, VLLM_TP, ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario

STATIC_PERCENTAGES = (5, 10, 15, 20, 25)
STOCK_CHUNK_TOKENS = (128, 256, 512, 1024, 2048, 4096)
"""Maximum tokens of stock vLLM's steps next to its default, which for long prompts is far from the best."""
LAYOUT_CHUNK_TOKENS = (256, 512, 1024, 2048)
MIXED_STEP_TOKENS = (256, 512, 1024, 2048, 4096)
"""Maximum tokens of PipeMax's mixed steps, from which a reader picks the best for a node and a workload."""


def mixed_names() -> list[str]:
    """Return the names of PipeMax with mixed batching."""
    return [f"pipemax_mixed_{tokens}" for tokens in MIXED_STEP_TOKENS]


def pipemax_layout_names(node: NodeSpec) -> list[str]:
    """Return the names of PipeMax over stages of several GPUs, in phases and with mixed batching."""
    return [
        name
        for layout in _layout_names(node)
        for name in (
            f"pipemax_{layout}",
            *(f"pipemax_{layout}_mixed_{tokens}" for tokens in MIXED_STEP_TOKENS),
        )
    ]


def stock_chunk_names() -> list[str]:
    """Return the names of pipeline-parallel vLLM 0.32 with other maximum tokens of a step."""
    return [f"vllm_032_pp_{tokens}" for tokens in STOCK_CHUNK_TOKENS]


def balanced_names() -> list[str]:
    """Return the names of pipeline-parallel vLLM 0.32 with balanced decode batches."""
    return [f"vllm_032_balanced_{tokens}" for tokens in STOCK_CHUNK_TOKENS]


def stock_layout_names(node: NodeSpec) -> list[str]:
    """Return the names of vLLM 0.32 with tensor and pipeline parallelism together, over some sizes of a step."""
    return [f"vllm_032_{layout}_{tokens}" for layout in _layout_names(node) for tokens in LAYOUT_CHUNK_TOKENS]


def _layout_names(node: NodeSpec) -> list[str]:
    """Return the names of layouts with several stages of several GPUs: ``t2p4`` has four stages of two."""
    return [
        f"t{tensor}p{node.num_gpus // tensor}"
        for tensor in (4, 2)
        if tensor < node.num_gpus and node.num_gpus % tensor == 0
    ]


def _tensor_of(layout: str) -> int:
    return int(layout.removeprefix("t").partition("p")[0])


def baseline_names(node: NodeSpec) -> list[str]:
    """Return the names of other systems, as far as the node has the GPUs for them."""
    names = ["vllm_tp", "vllm_pp", "vllm_032_pp", "td_pipe", "td_pipe_tuned", f"seesaw_t{node.num_gpus}"]
    if node.num_gpus % 2 == 0 and node.num_gpus > 2:
        names.append(f"seesaw_t{node.num_gpus // 2}p2")
    return [*names, "flexgen", "tightllm"]


def ablation_names() -> list[str]:
    """Return the names of the ablations: PipeMax with one thing changed."""
    static = [f"static_{percentage}" for percentage in STATIC_PERCENTAGES]
    return [*static, "layer_first", "no_activation_priority"]


def system_names(node: NodeSpec) -> list[str]:
    """Return the names of all systems that can be simulated on a node."""
    return [
        "pipemax",
        *baseline_names(node),
        *stock_chunk_names(),
        *balanced_names(),
        *stock_layout_names(node),
        *mixed_names(),
        *pipemax_layout_names(node),
        *ablation_names(),
    ]


def check_name(name: str, node: NodeSpec) -> None:
    """Raise ``ValueError`` for a name that no system has on this node."""
    if name not in system_names(node):
        raise ValueError(f"no system {name!r}; there are {', '.join(system_names(node))}")


def simulate(name: str, scenario: Scenario) -> SimulationResult:
    """Simulate one system. Raise ``ValueError`` for an unknown name, or if the model does not fit the node."""
    check_name(name, scenario.node)
    n = scenario.node.num_gpus
    match name.split("_"):
        case ["vllm", "tp"]:
            return ContinuousBatching(scenario, VLLM_TP).simulate()
        case ["vllm", "pp"]:
            return ContinuousBatching(scenario, VLLM_PP).simulate()
        case ["vllm", "032", "pp"]:
            return ContinuousBatching(scenario, replace(STOCK_VLLM, name=name)).simulate()
        case ["vllm", "032", "pp" | "balanced" as kind, tokens]:
            policy = stock_vllm(int(tokens), balances_decodes=kind == "balanced", name=name)
            return ContinuousBatching(scenario, policy).simulate()
        case ["vllm", "032", layout, tokens]:
            policy = stock_vllm(int(tokens), tensor=_tensor_of(layout), name=name)
            return ContinuousBatching(scenario, policy).simulate()
        case ["td", "pipe"]:
            return TdPipe(scenario).simulate()
        case ["td", "pipe", "tuned"]:
            return simulate_tuned(scenario)
        case ["seesaw", layout] if layout == f"t{n}":
            return Seesaw(scenario, Parallelism(pipeline=1, tensor=n), name=name).simulate()
        case ["seesaw", _]:
            return Seesaw(scenario, Parallelism(pipeline=2, tensor=n // 2), name=name).simulate()
        case ["flexgen" | "tightllm"]:
            return Offloading(scenario, is_adaptive=name == "tightllm").simulate()
        case ["static", percentage]:
            options = PipeMaxOptions(name=name)
            return StaticPrefetchSystem(scenario, options, fraction=int(percentage) / 100).simulate()
        case ["layer", "first"]:
            return LayerFirstSystem(scenario, PipeMaxOptions(name=name)).simulate()
        case ["no", "activation", "priority"]:
            return NoActivationPrioritySystem(scenario, PipeMaxOptions(name=name)).simulate()
        case _:
            return PipeMaxSystem(scenario, _options(name)).simulate()


def _options(name: str) -> PipeMaxOptions:
    named = partial(PipeMaxOptions, name=name)
    match name.split("_"):
        case ["pipemax", "mixed", tokens]:
            return named(controller=mixed_batching(int(tokens)))
        case ["pipemax", layout]:
            return named(tensor=_tensor_of(layout))
        case ["pipemax", layout, "mixed", tokens]:
            return named(tensor=_tensor_of(layout), controller=mixed_batching(int(tokens)))
        case _:
            return named()
