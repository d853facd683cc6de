"""Compare PipeMax, with and without waves, with stock vLLM on one stage of two.

    python -m lab.gpu.stage_of_two --out DIR [--seconds S]

The engine holds half of Qwen3-32B with dummy weights, and 4.2 GB of KV: what one of two cards of 40 GB has. Two
batches are in flight in a pipeline of two stages; stock vLLM's hold half of the pool each, which on one stage is
``loop:N``, N rows at a time. PipeMax rotates two batches. With ``waves: on`` a batch makes room for the next one while
it computes, and all its CUDA graphs are piecewise. Rows have ShareGPT's lengths. What two stages would add (sends,
bubbles) is not in it.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.gpu.criteria import Criterion, print_verdict
from lab.gpu.drive import Drive, Lengths, Round
from lab.gpu.models import BLOCK_TOKENS, STAGE_OF_TWO, make_stage_model, stage_config
from lab.gpu.rates import WindowRates
from lab.gpu.side_by_side import GPU_MODULES, begin_run, ended_by_sigterm, preload
from lab.gpu.stage_of_eight import MOST_GROWTH, row_lengths, run_drives, stage_drive, stock_rows, windows

KV_BLOCKS = 2_000
NUM_BATCHES = 2
MOST_STALL = 0.02


def stock_drive(model: Path, lengths: Lengths, out: Path) -> Drive:
    rows = stock_rows(lengths, KV_BLOCKS * BLOCK_TOKENS / NUM_BATCHES)
    config = _config(model, policy="vllm", max_num_seqs=rows.at_first)
    round_ = Round(limit_s=18.0, in_flight=rows.in_the_long_run)
    return stage_drive(config, lengths, out / "stock.json", round_, settle_s=6.0)


def pipemax_drive(model: Path, lengths: Lengths, out: Path, name: str, **fields: Any) -> Drive:
    config = _config(
        model,
        policy="pipemax",
        check_at_start=False,
        max_num_seqs=256,
        num_batches=NUM_BATCHES,
        host_kv_gib=12,
        calibrate_at_start_s=8,
        batching="mixed",
        **fields,
    )
    round_ = Round(limit_s=28.0, batching="mixed")
    return stage_drive(config, lengths, out / f"{name}.json", round_, settle_s=10.0)


def _config(model: Path, **fields: Any) -> dict[str, Any]:
    return stage_config(model, STAGE_OF_TWO, kv_blocks=KV_BLOCKS, **fields)


def judge(
    stock: WindowRates | None, without: WindowRates | None, waves: WindowRates | None
) -> list[Criterion]:
    """Judge the steady windows; none of these if one is missing."""
    if stock is None or without is None or waves is None:
        names = ("stock vLLM", "PipeMax", "PipeMax with waves")
        missing = [name for name, each in zip(names, (stock, without, waves), strict=True) if each is None]
        return [Criterion(criterion="all have a steady window", figure=", ".join(missing), passed=False)]
    rate, stall = waves.output_tokens_per_s, waves.stall_share or 0.0
    growth = max(abs(each.live_pools_per_s or 0.0) for each in (without, waves))
    return [
        Criterion(
            criterion="live KV is steady: it changes by less than 1 % of the pool a second",
            figure=f"{growth:.2%}",
            passed=growth < MOST_GROWTH,
        ),
        Criterion(
            criterion="waves make more tokens/s than PipeMax without them",
            figure=f"{rate:,.0f} and {without.output_tokens_per_s:,.0f}: {rate / without.output_tokens_per_s:.3f}",
            passed=rate > without.output_tokens_per_s,
        ),
        Criterion(
            criterion="waves make more tokens/s than stock vLLM's loop",
            figure=f"{rate:,.0f} and {stock.output_tokens_per_s:,.0f}: {rate / stock.output_tokens_per_s:.3f}",
            passed=rate > stock.output_tokens_per_s,
        ),
        Criterion(
            criterion="stalls are less than 2 % of the time",
            figure=f"{stall:.2%}",
            passed=stall < MOST_STALL,
        ),
    ]


def main(arguments: Sequence[str]) -> int:
    limits = begin_run(__doc__, arguments)
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="pipemax-stage-") as directory:
        model, lengths = Path(directory), row_lengths()
        make_stage_model(model, STAGE_OF_TWO)
        preload(GPU_MODULES)
        drives = {
            "waves": pipemax_drive(model, lengths, limits.out, "waves", waves="on"),
            "stock": stock_drive(model, lengths, limits.out),
            "pipemax": pipemax_drive(model, lengths, limits.out, "pipemax"),
        }
        run_drives(drives, limits)
    found = {name: windows(plan.results) for name, plan in drives.items()}
    stock = next(iter(found["stock"].values()), None)
    passed = print_verdict(
        "stage of two",
        judge(stock, found["pipemax"].get("mixed: steady"), found["waves"].get("mixed: steady")),
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
