"""Run the simulations behind ``lab/results/simulation.md`` and print its tables.

    python lab/bench/simulation.py matrix      every node × model × workload of the paper, PipeMax and other systems
    python lab/bench/simulation.py ablations   static prefetch, layer-first and victim policies
    python lab/bench/simulation.py sensitivity all-reduce, host DRAM cap, host memory, estimator error
    python lab/bench/simulation.py thresholds  the controller's named defaults, one changed at a time

Each prints Markdown; ``--json FILE`` keeps the figures. One process, no threads. ``matrix --known FILE`` does not run
again what is in a file that ``matrix`` wrote. ``lab.bench.results`` compares with the best-tuned stock vLLM instead.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.paper.ablations import VictimPolicy, VictimSystem
from lab.paper.catalog import (
    mixed_names,
    stock_chunk_names,
    stock_layout_names,
)
from lab.paper.compute_bound import operations
from lab.paper.lengths import open_workload
from lab.paper.plots import plot_ratios
from lab.paper.study import PAPER_SETTINGS, named_systems, run_study
from lab.paper.study_report import json_objects
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.presets import load_model, load_node, override
from pipemax.sim.systems.continuous import STOCK_VLLM
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload

COMPARED = ("vllm_tp", "vllm_pp", "td_pipe_tuned", "td_pipe", "seesaw_t8", "seesaw_t4p2")
"""Compared with PipeMax with separated batching; stock vLLM 0.32 is compared at its best size of a step."""


def line(cells: list[Any]) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def heading(names: list[str]) -> None:
    line(names)
    line(["---"] * len(names))


def matrix(num_requests: int, known: Sequence[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Print PipeMax's throughput, and its ratio to each other system's: over whole runs, and over their steady part.

    Then stock vLLM's over the sizes of a step, with pipeline parallelism and with both kinds of it. What is ``known``
    of as many requests is not run again; of two known runs the later one counts.
    """
    others = ["vLLM 0.32 PP, best step", *COMPARED]
    heading(
        ["node", "model", "workload", "rate", "PipeMax", *(f"/ {name}" for name in others), "of bound"],
    )
    curves: list[list[Any]] = []
    for node_name, model_name, workload_name in PAPER_SETTINGS:
        node, model = load_node(node_name), load_model(model_name)
        workload = open_workload(workload_name, num_requests)
        chunks, layouts = [*stock_chunk_names(), STOCK_VLLM.name], stock_layout_names(node)
        systems = ["pipemax", *COMPARED, *mixed_names(), *chunks, *layouts]
        setting = (node_name, model_name, workload_name, num_requests)
        by_name = {entry["system"]: entry for entry in known if _setting_of(entry) == setting}
        if missing := [name for name in systems if name not in by_name]:
            by_name |= {
                entry["system"]: entry for entry in json_objects(run_study(node, model, workload, missing))
            }
        if "idle_share" not in by_name["pipemax"]:
            by_name["pipemax"].update(_headroom(node, model, workload, by_name["pipemax"]))
        for rate, key in (("whole run", "total_tokens_per_s"), ("steady", "steady_tokens_per_s")):
            rates = {name: entry[key] for name, entry in by_name.items()}
            ours, best = rates["pipemax"], max(rates[name] for name in chunks)
            ratios = [f"{ours / other:.2f}" for other in (best, *(rates[name] for name in COMPARED))]
            of_bound = f"{ours / by_name['pipemax']['compute_bound_tokens_per_s']:.0%}"
            line([node_name, model_name, workload_name, rate, f"{ours:,.0f}", *ratios, of_bound])
            for layout, names in (("PP", chunks), ("TP × PP", layouts)):
                curve = ", ".join(f"{name.removeprefix('vllm_032_')} {rates[name]:,.0f}" for name in names)
                curves.append([node_name, model_name, workload_name, rate, layout, curve])
        yield from (by_name[name] for name in systems)
    print()
    heading(["node", "model", "workload", "rate", "layout", "tokens/s by the maximum tokens of a step"])
    for curve_line in curves:
        line(curve_line)


def _setting_of(entry: dict[str, Any]) -> tuple[str, str, str, int]:
    return entry["node"], entry["model"], entry["workload"], entry["requests"]


def plot_matrix(entries: list[dict[str, Any]], path: Path) -> None:
    """Draw the steady throughput of PipeMax and the compared systems, relative to vLLM (TP)'s."""
    rates: dict[str, dict[str, float]] = {}
    for entry in entries:
        if entry["system"] in ("pipemax", "vllm_tp", "vllm_pp", "td_pipe_tuned", "seesaw_t8"):
            group = rates.setdefault(f"{entry['model']}\n{entry['node']}\n{entry['workload']}", {})
            group[entry["system"]] = entry["steady_tokens_per_s"]
    groups = {
        name: {system: rate / group["vllm_tp"] for system, rate in group.items()}
        for name, group in rates.items()
    }
    plot_ratios(groups, path)


def _headroom(
    node: NodeSpec, model: ModelSpec, workload: Workload, entry: dict[str, Any]
) -> dict[str, float]:
    """Return the shares of a run's GPU time.

    They are arithmetic at the achieved rate, what prefill and decode take beyond it (reading weights and KV, unfilled
    tiles, fixed costs), and idling.
    """
    prompt_ops, decode_ops = operations(model, workload)
    gpu_operations = node.gpu.flops_per_s * entry["seconds"] * node.num_gpus
    busy, decode = 1 - entry["bubble_fraction"], entry["decode_fraction"]
    shares = {
        "prompt_arithmetic_share": prompt_ops / gpu_operations,
        "prefill_beyond_share": busy - decode - prompt_ops / gpu_operations,
        "decode_arithmetic_share": decode_ops / gpu_operations,
        "decode_beyond_share": decode - decode_ops / gpu_operations,
        "idle_share": entry["bubble_fraction"],
    }
    return {name: round(share, 4) for name, share in shares.items()}


def _pipemax(
    node: NodeSpec,
    model: ModelSpec,
    num_requests: int,
    options: PipeMaxOptions,
    make: Callable[[Scenario, PipeMaxOptions], PipeMaxSystem] = PipeMaxSystem,
) -> dict[str, Any]:
    workload = open_workload("sharegpt", num_requests)
    result = make(Scenario(node=node, model=model, workload=workload), options).simulate()
    return {
        "system": options.name,
        "node": node.name,
        "total_tokens_per_s": round(result.total_tokens_per_s, 1),
        "steady_tokens_per_s": round(result.steady_tokens_per_s, 1),
        "mean_decode_batch": round(result.mean_decode_batch, 1),
        "bubble_fraction": round(result.bubble_fraction, 4),
        "h2d_fraction": round(result.h2d_fraction, 4),
    }


def ablations(num_requests: int) -> Iterator[dict[str, Any]]:
    """Run the ablations on the paper's setup: 70B and ShareGPT on the RTX 5090 and L20 nodes."""
    heading(["node", "system", "tok/s", "/ PipeMax", "steady tok/s", "decode batch", "bubble", "host → GPU"])
    model = load_model("llama2-70b")
    for node_name in ("rtx5090x8", "l20x8"):
        node = load_node(node_name)
        workload = open_workload("sharegpt", num_requests)
        names = [
            "pipemax",
            *(name for name in named_systems("all", node) if name.startswith(("static", "layer", "no_"))),
        ]
        entries = json_objects(run_study(node, model, workload, names))
        for policy in VictimPolicy:
            options, make = PipeMaxOptions(name=f"victims: {policy}"), partial(VictimSystem, policy=policy)
            entries.append(_pipemax(node, model, num_requests, options, make))
        for entry in entries:
            _print_entry(node_name, entry, entries[0]["total_tokens_per_s"])
            yield entry


def sensitivity(num_requests: int) -> Iterator[dict[str, Any]]:
    """Run 70B and ShareGPT on the RTX 5090 node, with one number changed at a time."""
    heading(["what", "system", "tok/s", "/ PipeMax", "steady tok/s", "decode batch", "bubble", "host → GPU"])
    node, model = load_node("rtx5090x8"), load_model("llama2-70b")
    base = _pipemax(node, model, num_requests, PipeMaxOptions())["total_tokens_per_s"]
    workload = open_workload("sharegpt", num_requests)
    for bandwidth in (10e9, 20e9, 40e9):
        changed = override(node, {"all_reduce.bus_bytes_per_s": bandwidth})
        systems = ["vllm_tp", "seesaw_t8", "seesaw_t4p2"]
        for entry in json_objects(run_study(changed, model, workload, systems)):
            _print_entry(f"all-reduce {bandwidth / 1e9:.0f} GB/s", entry, base)
            yield {**entry, "what": f"all_reduce {bandwidth / 1e9:.0f}"}
    cases: list[tuple[str, str, str, tuple[float, ...]]] = [
        ("host DRAM cap", "GB/s", "host_dram_bytes_per_s", (100e9, 200e9, 300e9, 400e9, 600e9)),
        ("host memory", "GB", "host_memory_bytes", (128e9, 256e9, 512e9, 1024e9)),
    ]
    for what, unit, path, sizes in cases:
        for size in sizes:
            entry = _pipemax(override(node, {path: size}), model, num_requests, PipeMaxOptions())
            _print_entry(f"{what} {size / 1e9:.0f} {unit}", entry, base)
            yield {**entry, "what": f"{what} {size / 1e9:.0f}"}
    for batches in (8, 9, 10, 12):
        entry = _pipemax(node, model, num_requests, replace(PipeMaxOptions(), num_batches=batches))
        _print_entry(f"n = {batches} batches", entry, base)
        yield {**entry, "what": f"batches {batches}"}
    for bias in (-0.2, -0.1, 0.1, 0.2):
        entry = _pipemax(node, model, num_requests, replace(PipeMaxOptions(), estimator_bias=bias))
        _print_entry(f"estimator error {bias:+.0%}", entry, base)
        yield {**entry, "what": f"estimator {bias:+.0%}"}


def thresholds(num_requests: int) -> Iterator[dict[str, Any]]:
    """Vary w, the threshold of steadiness and the low watermark: 70B and ShareGPT on the RTX 5090 and L20 nodes.

    The nodes have so little host memory that prefill and decode take turns.
    """
    heading(["what", "system", "tok/s", "/ PipeMax", "steady tok/s", "decode batch", "bubble", "host → GPU"])
    model = load_model("llama2-70b")
    for node_name, host_bytes in (("rtx5090x8", 256e9), ("l20x8", 384e9)):
        node = override(load_node(node_name), {"host_memory_bytes": host_bytes})
        base = _pipemax(node, model, num_requests, PipeMaxOptions())["total_tokens_per_s"]
        for changes in _threshold_changes():
            entry = _pipemax(node, model, num_requests, PipeMaxOptions(controller=changes))
            what = ", ".join(f"{name} {value}" for name, value in changes.items()) or "defaults"
            _print_entry(f"{node_name}: {what}", entry, base)
            yield {**entry, "what": what}


def _threshold_changes() -> Iterator[dict[str, float]]:
    yield {}
    for window in (4, 16, 64):
        for threshold in (0.05, 0.1, 0.3):
            yield {"steady_window": window, "steady_threshold": threshold}
    yield {"steady_window": 1, "steady_threshold": 1.0}  # GreedySelect from the first iteration on
    yield {"steady_threshold": 0.0}  # ShortFirstFill throughout
    for watermark in (1.0, 1.25, 2.0):
        yield {"gpu_low_watermark": watermark}


def _print_entry(what: str, entry: dict[str, Any], reference: float) -> None:
    line(
        [
            what,
            entry["system"],
            f"{entry['total_tokens_per_s']:,.0f}",
            f"{entry['total_tokens_per_s'] / reference:.2f}",
            f"{entry['steady_tokens_per_s']:,.0f}",
            entry["mean_decode_batch"],
            f"{entry['bubble_fraction']:.1%}",
            f"{entry['h2d_fraction']:.1%}",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    studies = {
        "matrix": lambda num_requests: matrix(num_requests, known),
        "ablations": ablations,
        "sensitivity": sensitivity,
        "thresholds": thresholds,
    }
    parser.add_argument("study", choices=[*studies])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--known", type=Path, nargs="+", default=[], help="of matrix: its own figures")
    parser.add_argument("--plot", type=Path, help="of the matrix: file for its picture, as fig:overall")
    arguments = parser.parse_args()
    known = [entry for path in arguments.known for entry in json.loads(path.read_text(encoding="utf-8"))]
    entries: list[dict[str, Any]] = []
    for entry in studies[arguments.study](arguments.requests):
        entries.append(entry)
        if arguments.json:
            arguments.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        plot_matrix(entries, arguments.plot)


if __name__ == "__main__":
    main()
