"""Compare PipeMax with stock vLLM on one stage of eight.

    python -m lab.gpu.stage_of_eight --out DIR [--seconds S]

The engine holds ten layers of LLaMA-2-70B with dummy weights, and 11.6 GB of KV: what one of eight cards of 32 GB has
of the model. In a pipeline of eight stages, eight batches are in flight. Stock vLLM's hold all their KV on the GPU, so
each has an eighth of the pool; on one stage this is ``loop:N``, N rows at a time. PipeMax rotates eight batches, each
of which may fill the pool. Rows have ShareGPT's lengths. What eight stages would add (sends, bubbles) is not in it.
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.gpu.criteria import Criterion, print_verdict
from lab.gpu.drive import Drive, Lengths, Round, drive, read_rounds
from lab.gpu.models import BLOCK_TOKENS, STAGE_BLOCKS, make_stage_model, stage_config
from lab.gpu.rates import WindowRates
from lab.gpu.side_by_side import (
    GPU_MODULES,
    Job,
    Limits,
    begin_run,
    ended_by_sigterm,
    preload,
    run_together,
)
from lab.gpu.tables import print_table

NUM_ROWS = 4000
NUM_STAGES = 8
BATCH_TOKENS = STAGE_BLOCKS * BLOCK_TOKENS / NUM_STAGES
"""Of KV in each of stock vLLM's batches."""
MOST_TOKENS = 1960
"""Of prompt and output together: less than the model's, because words make a few tokens more than asked for."""
LEAST_WITHIN = 0.8
MOST_STALL = 0.01
MOST_GROWTH = 0.01
"""Of live KV, in pools a second: beyond it the tokens/s of PipeMax and of stock vLLM are not comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRows:
    """How many rows each of a stock pipeline's eight batches holds."""

    in_the_long_run: int
    at_first: int
    """While all rows have just begun."""


def row_lengths() -> list[tuple[int, int]]:
    """Return ShareGPT's lengths, cut to the model's maximum."""
    from lab.paper.lengths import open_workload

    load = open_workload("sharegpt", NUM_ROWS)
    return [cut_lengths(int(p), int(o)) for p, o in zip(load.prompt_tokens, load.output_tokens, strict=True)]


def cut_lengths(prompt_tokens: int, output_tokens: int) -> tuple[int, int]:
    prompt = min(prompt_tokens, MOST_TOKENS - 64)
    return prompt, max(1, min(output_tokens, MOST_TOKENS - prompt - 8))


def stock_rows(lengths: Lengths, batch_tokens: float = BATCH_TOKENS) -> StockRows:
    """Divide a batch's part of the pool by what a running row holds on average.

    Each row counts for as many steps as it has outputs.
    """
    held = sum(p * o + o * o / 2 for p, o in lengths) / sum(o for _, o in lengths) + BLOCK_TOKENS / 2
    young = sum(p for p, _ in lengths) / len(lengths) + 1.5 * BLOCK_TOKENS
    return StockRows(in_the_long_run=int(batch_tokens / held), at_first=int(batch_tokens / young))


def stock_drive(model: Path, lengths: Lengths, out: Path) -> Drive:
    rows = stock_rows(lengths)
    config = stage_config(model, policy="vllm", max_num_seqs=rows.at_first)
    round_ = Round(limit_s=20.0, in_flight=rows.in_the_long_run)
    return stage_drive(config, lengths, out / "stock.json", round_, settle_s=5.0)


def pipemax_drive(model: Path, lengths: Lengths, out: Path) -> Drive:
    # 1,024 slots: with fewer, slots and not blocks would limit the residents while rows are young.
    fields = {"num_batches": NUM_STAGES, "host_kv_gib": 40, "calibrate_at_start_s": 12, "batching": "mixed"}
    config = stage_config(model, policy="pipemax", check_at_start=False, max_num_seqs=1024, **fields)
    round_ = Round(limit_s=75.0, batching="mixed")
    return stage_drive(config, lengths, out / "pipemax.json", round_, settle_s=40.0)


def stage_drive(
    config: Mapping[str, Any], lengths: Lengths, results: Path, round_: Round, *, settle_s: float
) -> Drive:
    """Return a drive of one round, of a table whose end is not in sight."""
    return Drive(
        config=config,
        lengths=lengths,
        rounds=(round_,),
        results=results,
        num_warm_up=32,
        settle_s=settle_s,
        is_input_open=True,
    )


def run_drives(drives: Mapping[str, Drive], limits: Limits) -> None:
    """Run one after the other within the limits, and print the rounds of each."""
    for name, plan in drives.items():
        job = Job(name=name, work=lambda plan=plan: drive(plan))
        (end,) = run_together([job], limits.out, limit_s=limits.deadline_s - time.monotonic())
        print(f"{name}: {end.result} after {end.seconds:.0f} s", flush=True)
        print_rounds(name, plan.results)


def windows(results: Path) -> dict[str, WindowRates]:
    """Return each round's windows by their names, such as ``mixed: steady``."""
    found = [window for round_ in read_rounds(results) for window in round_["windows"]]
    return {window["window"]: WindowRates(**window) for window in found}


def judge(stock: WindowRates | None, mixed: WindowRates | None) -> list[Criterion]:
    """Judge the steady windows of stock vLLM's loop and of PipeMax's mixed batches; none of these if one is missing."""
    if stock is None or mixed is None:
        missing = "stock vLLM's loop" if stock is None else "PipeMax's mixed batches"
        return [Criterion(criterion="both have a steady window", figure=f"{missing}: none", passed=False)]
    rate, stock_rate = mixed.output_tokens_per_s, stock.output_tokens_per_s
    stall, within = mixed.stall_share or 0.0, mixed.share_within_5_percent or 0.0
    cpu_ms, step_ms = mixed.core_cpu_ms_per_step or 0.0, mixed.step_ms or 0.0
    growth = mixed.live_pools_per_s or 0.0
    return [
        Criterion(
            criterion="live KV is steady: it grows by less than 1 % of the pool a second",
            figure=f"{growth:.2%}",
            passed=abs(growth) < MOST_GROWTH,
        ),
        Criterion(
            criterion="mixed batches make more tokens/s than stock vLLM's loop",
            figure=f"{rate:,.0f} and {stock_rate:,.0f}: {rate / stock_rate:.3f}",
            passed=rate > stock_rate,
        ),
        Criterion(
            criterion="stalls are less than 1 % of the time",
            figure=f"{stall:.2%}",
            passed=stall < MOST_STALL,
        ),
        Criterion(
            criterion="the estimator is within 5 % in at least 80 % of the steps",
            figure=f"{within:.1%}",
            passed=within >= LEAST_WITHIN,
        ),
        Criterion(
            criterion="the core's CPU time of a step is less than the step",
            figure=f"{cpu_ms:.2f} and {step_ms:.2f} ms",
            passed=cpu_ms < step_ms,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """A round as a whole, with its beginning and its end."""

    round: str
    rows_done: int
    rows: int
    errors: int
    seconds: float
    preemptions: float
    evictions: float
    prefetched_blocks: float


def print_rounds(name: str, results: Path) -> None:
    rounds = read_rounds(results)
    if not rounds:
        print(f"{name}: no round was finished", flush=True)
        return
    print_table(f"{name}: rounds", [_round_row(figures) for figures in rounds])
    if found := windows(results):
        print_table(f"{name}: windows", list(found.values()))


def _round_row(figures: Mapping[str, Any]) -> RoundRow:
    same = ("round", "seconds", "preemptions", "evictions", "prefetched_blocks")
    return RoundRow(
        rows_done=figures["rows"],
        rows=figures["of"],
        errors=len(figures["errors"]),
        **{name: figures[name] for name in same},
    )


def main(arguments: Sequence[str]) -> int:
    limits = begin_run(__doc__, arguments)
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="pipemax-stage-") as directory:
        model, lengths = Path(directory), row_lengths()
        make_stage_model(model)
        preload(GPU_MODULES)
        drives = {
            "stock": stock_drive(model, lengths, limits.out),
            "pipemax": pipemax_drive(model, lengths, limits.out),
        }
        run_drives(drives, limits)
    stock, pipemax = (windows(plan.results) for plan in drives.values())
    loop = f"loop:{stock_rows(lengths).in_the_long_run}: steady"
    passed = print_verdict("stage of eight", judge(stock.get(loop), pipemax.get("mixed: steady")))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
