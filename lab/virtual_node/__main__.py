"""Run vLLM's real schedulers and PipeMax's over a virtual node, and compare each with its simulation.

    python -m lab.virtual_node [--node N] [--model M] [--workload W] [--rows N] [--json FILE]
    python -m lab.virtual_node --matrix [--rows N] [--json FILE]

For one node, model and workload of ``presets/``: vLLM 0.32 with pipeline parallelism over a curve of chunk sizes
(``max_num_batched_tokens``), with tensor parallelism, with both, with vLLM's own KV offloading to host memory under
pipeline parallelism, and PipeMax with separated and with mixed batching.
The engine core is real, and the CPU time of its thread counts in the node's time (``--host-factor 0`` leaves it out);
waits are left out (``lab/virtual_node/README.md``). All requests are there at the start. ``--matrix`` runs all settings
of the paper, one after another. It prints Markdown; ``--json`` keeps a list of objects, one for each run:

    total_tokens_per_s      prompts and outputs over the whole run, drain included
    steady_tokens_per_s     until nine tenths of the requests had finished
    ratio_to_best_stock     of total_tokens_per_s, to the best run of vLLM's own scheduler
    scheduler_ms_per_step   CPU time of the engine core for each step
    host_bubble             share of the run in which the first stage had no step while the core worked
    simulated_tokens_per_s  what the simulator says for the same requests; null for what it does not know

``--check-kv`` checks that every step and every copy of PipeMax finds the KV that it should, which takes its time.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.paper.catalog import MIXED_STEP_TOKENS, STOCK_CHUNK_TOKENS
from lab.paper.lengths import open_workload
from lab.paper.study import PAPER_SETTINGS
from lab.virtual_node.executor import VirtualNodeExecutor
from lab.virtual_node.launch import RehearsedEngine
from lab.virtual_node.offloading import OffloadingNodeExecutor, offloading_arguments
from lab.virtual_node.run import RehearsalResult, rehearse
from lab.virtual_node.settings import ClockSettings
from pipemax.config import Policy
from pipemax.domain.plan import Batching
from pipemax.domain.specs import KvCacheDtype, ModelSpec, NodeSpec, Parallelism
from pipemax.presets import load_model, load_node
from pipemax.sim.machine import prefill_step_tokens
from pipemax.sim.systems.continuous import STOCK_VLLM, ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload

PP_CHUNKS = (*STOCK_CHUNK_TOKENS, STOCK_VLLM.max_batched_tokens)
TP_CHUNKS = (512, 2048)
OFFLOAD_CHUNKS = (512, 2048)
COLUMNS = (
    "system",
    "chunk_tokens",
    "total_tokens_per_s",
    "steady_tokens_per_s",
    "ratio_to_best_stock",
    "scheduler_ms_per_step",
    "host_bubble",
    "simulated_tokens_per_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One system to run."""

    system: str
    policy: Policy
    tensor: int
    chunk_tokens: int
    batching: Batching = Batching.SEPARATED
    offloads: bool = False
    """With vLLM's own offloading of KV to host memory."""


def settings(node: NodeSpec, model: ModelSpec) -> list[Setting]:
    """Return vLLM's layouts and chunks, and PipeMax: prefill steps of the simulator's size, and mixed steps."""
    stock = [Setting(system="vllm_pp", policy=Policy.VLLM, tensor=1, chunk_tokens=size) for size in PP_CHUNKS]
    tensor = node.num_gpus
    while tensor > 1:
        layout = f"t{tensor}p{node.num_gpus // tensor}" if tensor < node.num_gpus else "tp"
        stock += [
            Setting(system=f"vllm_{layout}", policy=Policy.VLLM, tensor=tensor, chunk_tokens=size)
            for size in TP_CHUNKS
        ]
        tensor //= 2
    offloading = partial(Setting, system="vllm_pp_offload", policy=Policy.VLLM, tensor=1, offloads=True)
    stock += [offloading(chunk_tokens=size) for size in OFFLOAD_CHUNKS]
    ours = partial(Setting, policy=Policy.PIPEMAX, tensor=1)
    mixed = [
        ours(system="pipemax_mixed", chunk_tokens=size, batching=Batching.MIXED) for size in MIXED_STEP_TOKENS
    ]
    return [*stock, ours(system="pipemax", chunk_tokens=prefill_step_tokens(node, model)), *mixed]


def engine_of(setting: Setting, node: NodeSpec, model: ModelSpec, workload: Workload) -> RehearsedEngine:
    controller: dict[str, Any] = {}
    if setting.policy is Policy.PIPEMAX:  # as in the simulator: a sample of the table tells the mean
        controller["initial_output_tokens"] = workload.typical_output_tokens
    return RehearsedEngine(
        node=node,
        model=model,
        parallelism=Parallelism(pipeline=node.num_gpus // setting.tensor, tensor=setting.tensor),
        policy=setting.policy,
        chunk_tokens=setting.chunk_tokens,
        max_model_len=int((workload.prompt_tokens + workload.output_tokens).max()) + 1,
        batching=setting.batching,
        controller=controller,
        vllm=offloading_arguments(node) if setting.offloads else {},
        executor=OffloadingNodeExecutor if setting.offloads else VirtualNodeExecutor,
    )


def simulated_tokens_per_s(setting: Setting, engine: RehearsedEngine, scenario: Scenario) -> float | None:
    """Return the simulator's figure for the same requests, under the same limits; it knows no vLLM that offloads."""
    if setting.offloads:
        return None
    if setting.policy is Policy.PIPEMAX:
        controller = mixed_batching(setting.chunk_tokens) if setting.batching is Batching.MIXED else {}
        return PipeMaxSystem(scenario, PipeMaxOptions(controller=controller)).simulate().total_tokens_per_s
    policy = stock_vllm(
        setting.chunk_tokens,
        tensor=setting.tensor,
        max_num_seqs=engine.max_num_seqs,
        keeps_preempted=True,
        name=setting.system,
    )
    return ContinuousBatching(scenario, policy).simulate().total_tokens_per_s


def run(
    chosen: list[Setting],
    node: NodeSpec,
    model: ModelSpec,
    workload: Workload,
    clock: ClockSettings,
    checks_kv: bool,
) -> Iterator[tuple[Setting, RehearsalResult, float | None]]:
    for setting in chosen:
        engine = replace(
            engine_of(setting, node, model, workload),
            clock=clock,
            checks_kv=checks_kv and setting.policy is Policy.PIPEMAX,
        )
        try:
            result = rehearse(engine, workload)
        except ValueError as error:
            print(f"{setting.system} {setting.chunk_tokens}: {error}", file=sys.stderr)
            continue
        scenario = Scenario(node=node, model=model, workload=workload)
        simulated = simulated_tokens_per_s(setting, engine, scenario)
        print(
            f"{setting.system} {setting.chunk_tokens}: {result.total_tokens_per_s:,.0f} tokens/s in "
            f"{result.num_steps:,} steps" + ("" if simulated is None else f", simulated {simulated:,.0f}"),
            file=sys.stderr,
            flush=True,
        )
        yield setting, result, simulated


def objects(
    ran: list[tuple[Setting, RehearsalResult, float | None]], node: str, model: ModelSpec, workload: Workload
) -> list[dict[str, Any]]:
    """Return the fields that the module's docstring names."""
    stock = [result.total_tokens_per_s for setting, result, _ in ran if setting.policy is Policy.VLLM]
    best = max(stock, default=None)
    return [
        {
            "node": node,
            "model": model.name,
            "kv_bytes_per_value": model.kv_value_bytes,
            "workload": workload.name,
            "rows": len(workload),
            "system": setting.system,
            "chunk_tokens": setting.chunk_tokens,
            "total_tokens_per_s": round(result.total_tokens_per_s, 1),
            "steady_tokens_per_s": round(result.steady_tokens_per_s, 1),
            "ratio_to_best_stock": None if best is None else round(result.total_tokens_per_s / best, 3),
            "scheduler_ms_per_step": round(result.host_ms_per_step, 3),
            "host_bubble": round(result.host_bubble, 4),
            "simulated_tokens_per_s": None if simulated is None else round(simulated, 1),
            "steps": result.num_steps,
            "seconds": round(result.seconds, 2),
            "busy": round(result.busy, 4),
        }
        for setting, result, simulated in ran
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--node", default="rtx5090x8")
    parser.add_argument("--model", default="llama2-70b")
    parser.add_argument("--kv-dtype", type=KvCacheDtype, choices=[*KvCacheDtype], default=KvCacheDtype.AUTO)
    parser.add_argument(
        "--workload",
        default="sharegpt",
        help="a name of presets/, a .yaml profile, or recorded .jsonl lengths",
    )
    parser.add_argument("--matrix", action="store_true", help="all nodes, models and workloads of the paper")
    parser.add_argument("--rows", type=int, default=1_000, help="requests (default 1,000)")
    parser.add_argument(
        "--systems", help="names separated by commas, also with a size: vllm_pp_512 (default: all)"
    )
    parser.add_argument("--host-factor", type=float, default=1.0, help="how far the core's CPU time counts")
    parser.add_argument("--check-kv", action="store_true", help="check what PipeMax's steps and copies find")
    parser.add_argument("--json", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    one = (arguments.node, arguments.model, arguments.workload)
    found: list[dict[str, Any]] = []
    for names in PAPER_SETTINGS if arguments.matrix else (one,):
        found += run_setting(names, arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def run_setting(names: tuple[str, str, str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all systems asked for on one node, model and workload, and print their table."""
    node, model = load_node(names[0]), load_model(names[1]).with_kv_dtype(arguments.kv_dtype)
    workload = open_workload(names[2], arguments.rows)
    wanted = arguments.systems.split(",") if arguments.systems else None
    chosen = [
        one
        for one in settings(node, model)
        if wanted is None or {one.system, f"{one.system}_{one.chunk_tokens}"} & {*wanted}
    ]
    clock = ClockSettings(host_factor=arguments.host_factor)
    ran = list(run(chosen, node, model, workload, clock, arguments.check_kv))
    found = objects(ran, names[0], model, workload)
    print(f"\n{names[0]}, {model.name}, {names[2]}, {len(workload):,} rows\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for entry in found:
        print("| " + " | ".join(str(entry[name]) for name in COLUMNS) + " |", flush=True)
    return found


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # vLLM's engines tell their whole configs
    sys.exit(main())
