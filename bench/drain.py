"""Simulate what it saves at a table's end to begin with the rows that are expected to be long.

    python bench/drain.py [--settings rtx5090x8:llama2-70b,l20x8:llama2-70b] [--systems vllm,pipemax] [--rows 5000]

One engine, whose table is one last chunk (``all``) or of which the second half is the last chunk (``half``), in the
order that the job would give it (``order_of_last_chunk``), from the same figures: rows with their own ``max_tokens``,
rows whose prompts tell how long answers are, and rows whose prompts do not. Arrivals are not in it: all rows are there
from the start, in their order. With ``--windows 256,1024`` also an order inside the engine: of so many rows that wait
there it takes the one that is expected to be longest, without and with the job's order of the second half. Prints a
Markdown table.
"""

import argparse
import heapq
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipemax.presets import load_model, load_node, load_workload
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import ContinuousBatching, vllm_032
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload, draw_workload
from pipemax_spark.job.chunks import RowOrder, order_of_last_chunk

Ints = npt.NDArray[np.int64]
STEP_TOKENS = 1024
KINDS = ("own max_tokens", "prompts tell", "prompts do not tell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows as they come."""

    prompts: Ints
    outputs: Ints
    rank: Ints
    """What the job sorts by: ``max_tokens``, or else the prompt's length."""
    has_own_max_tokens: bool = False


def draw(kind: str, num_rows: int, seed: int) -> Rows:
    """Draw rows with ShareGPT's prompts; ``kind`` says what tells their outputs."""
    rng = np.random.default_rng(seed)
    workload = draw_workload(load_workload("sharegpt"), num_rows, rng)
    prompts, outputs = workload.prompt_tokens, workload.output_tokens
    if kind == "own max_tokens":
        most = rng.choice([64, 128, 256, 1024], num_rows, p=[0.3, 0.3, 0.3, 0.1])
        outputs = np.maximum(1, most * rng.uniform(0.3, 1.0, num_rows)).astype(np.int64)
        return Rows(prompts=prompts, outputs=outputs, rank=most, has_own_max_tokens=True)
    if kind == "prompts tell":
        noisy = prompts * np.exp(0.4 * rng.standard_normal(num_rows))
        outputs = np.clip(noisy, 1, 2000).astype(np.int64)
    return Rows(prompts=prompts, outputs=outputs, rank=prompts)


def in_order(rows: Rows, last_share: float) -> tuple[Rows, RowOrder]:
    """Return the rows with their last share in the order that the job gives its last chunk, and that order."""
    first = len(rows.rank) - int(last_share * len(rows.rank))
    # The job learns from the rows before the last chunk, here from as many as there are in half a table.
    seen = slice(0, len(rows.rank) // 2)
    correlation = np.corrcoef(np.log1p(rows.prompts[seen]), np.log1p(rows.outputs[seen]))[0, 1]
    order = order_of_last_chunk(
        has_own_max_tokens=rows.has_own_max_tokens, length_correlation=float(correlation)
    )
    places = np.arange(len(rows.rank))
    if order is not RowOrder.AS_DEALT:
        sign = -1 if order is RowOrder.LAST_RANK_FIRST else 1
        places[first:] = first + np.argsort(sign * rows.rank[first:], kind="stable")
    ordered = replace(
        rows, prompts=rows.prompts[places], outputs=rows.outputs[places], rank=rows.rank[places]
    )
    return ordered, order


def taken_from_window(rows: Rows, window: int) -> Rows:
    """Return the rows in the order in which an engine takes them that has the longest of ``window`` rows go first."""
    waiting = [(-int(rank), place) for place, rank in enumerate(rows.rank[:window])]
    heapq.heapify(waiting)
    taken: list[int] = []
    for place in range(len(waiting), len(rows.rank)):
        taken.append(heapq.heapreplace(waiting, (-int(rows.rank[place]), place))[1])
    taken += [place for _, place in sorted(waiting)]
    places = np.array(taken)
    return replace(rows, prompts=rows.prompts[places], outputs=rows.outputs[places], rank=rows.rank[places])


def print_result(cells: list[str], result: SimulationResult) -> None:
    drain = 1 - result.steady_seconds / result.seconds
    print(
        f"| {' | '.join(cells)} | {result.total_tokens_per_s:,.0f} | {result.seconds:,.0f} | {drain:.1%} |",
        flush=True,
    )


def simulate(node: str, model: str, system: str, rows: Rows, host_gb: float | None) -> SimulationResult:
    spec = load_node(node)
    if host_gb is not None:
        spec = replace(spec, host_memory_bytes=host_gb * 1e9)
    workload = Workload(name="drain", prompt_tokens=rows.prompts, output_tokens=rows.outputs)
    scenario = Scenario(node=spec, model=load_model(model), workload=workload)
    if system == "pipemax":
        return PipeMaxSystem(scenario).simulate()
    policy = vllm_032(STEP_TOKENS, tensor=1, max_num_seqs=1024, keeps_preempted=True)
    return ContinuousBatching(scenario, policy).simulate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", default="rtx5090x8:llama2-70b,l20x8:llama2-70b", help="NODE:MODEL,…")
    parser.add_argument("--systems", default="vllm,pipemax")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--windows", default="", help="rows that wait in the engine: N,…; default none")
    parser.add_argument("--host-gb", type=float, help="host memory; the node profile's unless said")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    windows = [int(window) for window in arguments.windows.split(",") if window]
    print("| setting | system | rows | last chunk | order | tokens/s | seconds | after 90 % of the rows |")
    print("| --- | --- | --- | --- | --- | ---: | ---: | ---: |")
    for setting in arguments.settings.split(","):
        node, model = setting.split(":")
        for system in arguments.systems.split(","):
            for kind in KINDS:
                rows = draw(kind, arguments.rows, arguments.seed)
                for name, share in (("none", 0.0), ("half", 0.5), ("all", 1.0)):
                    ordered, order = in_order(rows, share)
                    if share and order is RowOrder.AS_DEALT:
                        print(f"| {setting} | {system} | {kind} | {name} | {order} | the same | | |")
                        continue
                    result = simulate(node, model, system, ordered, arguments.host_gb)
                    of_order = str(order) if share else "as they come"
                    print_result([setting, system, kind, name, of_order], result)
                    for window in windows if share < 1.0 and kind != "prompts do not tell" else []:
                        taken = taken_from_window(ordered, window)
                        result = simulate(node, model, system, taken, arguments.host_gb)
                        print_result([setting, system, kind, name, f"{of_order}, window {window:,}"], result)


if __name__ == "__main__":
    main()
