"""Stock vLLM and PipeMax side by side on rows of the demo table: `make compare`.

    python bench/compare_policies.py [--rows 600] [--json FILE]

Both get the same model, stages, KV bytes on each stage and rows; PipeMax has its host pool in addition. Each runs a
warm-up of a few rows, then all rows at once. The demo model is tiny and the stages share this machine's cores, so the
figures say how the two schedule, not what GPUs would do.
"""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from pipemax.api import GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig

_REPOSITORY = Path(__file__).resolve().parents[1]
_TABLE = _REPOSITORY / "examples" / "data" / "debian_packages.parquet"
_SCHEMA = _REPOSITORY / "examples" / "section.schema.json"
_CONFIG = _REPOSITORY / "conf" / "engines" / "demo.yaml"
_MODEL = _REPOSITORY / "examples" / "model"
_WARM_UP_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Result:
    """One policy's run."""

    policy: str
    rows: int
    seconds: float
    """Without the engine's start and the warm-up."""
    start_s: float
    output_tokens: int
    preemptions: int
    recomputed_or_evicted: int
    """Requests that left the GPU: preempted to be computed again, or evicted with their KV in host memory."""
    phase_switches: int
    output_steps: int
    """Steps that generated tokens."""
    mean_batch: float
    """Mean tokens of such a step: requests that decode in it, or whose prompt it completes."""
    stall_s: float
    time_s: dict[str, float]
    """Where the time went, by part."""

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


def demo_requests(rows: int, prefix: str) -> list[GenerationRequest]:
    sampling = Sampling(max_tokens=24, response_format=_SCHEMA.read_text())
    return [
        GenerationRequest(
            request_id=f"{prefix}{i}",
            prompt=f"Package: {row['package']}\nSummary: {row['summary']}\nDescription: {row['description']}",
            sampling=sampling,
        )
        for i, row in enumerate(pq.read_table(_TABLE).slice(0, rows).to_pylist())
    ]


def run(policy: str, rows: int) -> tuple[Result, dict[str, str | None]]:
    """Run one policy; return its figures, and each row's text."""
    config = EngineConfig.load(_CONFIG, model=str(_MODEL), policy=policy)
    begin_s = time.monotonic()
    with OfflineEngine(config) as engine:
        start_s = time.monotonic() - begin_s
        list(engine.generate(demo_requests(_WARM_UP_ROWS, "warm-up-")))
        before = engine.stats().metrics
        begin_s = time.monotonic()
        done = list(engine.generate(demo_requests(rows, "")))
        seconds = time.monotonic() - begin_s
        after = engine.stats().metrics
    counts = {name: value - before.get(name, 0.0) for name, value in after.items()}
    result = Result(
        policy=policy,
        rows=rows,
        seconds=seconds,
        start_s=start_s,
        output_tokens=sum(completion.completion_tokens for completion in done),
        preemptions=int(counts.get("preemptions", 0)),
        recomputed_or_evicted=int(counts.get("evictions", counts.get("preemptions", 0))),
        phase_switches=int(counts.get("phase_switches", 0)),
        output_steps=int(counts["output_steps"]),
        mean_batch=counts["output_tokens"] / counts["output_steps"],
        stall_s=counts.get("prefetch_stall_s", 0.0),
        time_s={
            name.removeprefix("time_").removesuffix("_s"): round(value, 3)
            for name, value in counts.items()
            if name.startswith("time_") and value > 0
        },
    )
    return result, {completion.request_id: completion.text for completion in done}


def print_results(console: Console, vllm: Result, pipemax: Result, equal_texts: int) -> None:
    table = Table(title=f"{vllm.rows} rows of the demo table, the same KV bytes on each of two stages")
    table.add_column("")
    for result in (vllm, pipemax):
        table.add_column(f"policy: {result.policy}", justify="right")
    lines = {
        "generated tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
        "rows/s": lambda r: f"{r.rows / r.seconds:,.1f}",
        "seconds, engine start apart": lambda r: f"{r.seconds:,.1f} (+ {r.start_s:,.0f} start)",
        "steps that generate": lambda r: f"{r.output_steps:,}",
        "tokens of such a step, mean": lambda r: f"{r.mean_batch:,.1f}",
        "left the GPU (preempted or evicted)": lambda r: f"{r.recomputed_or_evicted:,}",
        "phase switches": lambda r: f"{r.phase_switches:,}",
        "prefetch stall, s": lambda r: f"{r.stall_s:,.2f}",
        "time in prefill, s": lambda r: f"{r.time_s.get('prefill', 0.0):,.1f}",
        "time in decode and drain, s": lambda r: (
            f"{r.time_s.get('decode', 0.0) + r.time_s.get('drain', 0.0):,.1f}"
        ),
    }
    for name, show in lines.items():
        table.add_row(name, show(vllm), show(pipemax))
    console.print(table)
    ratio = pipemax.tokens_per_s / vllm.tokens_per_s
    verdict = "wins" if ratio > 1 else "loses"
    console.print(
        f"PipeMax {verdict} here: {ratio:.2f} times stock vLLM's tokens/s. {equal_texts:,} of {vllm.rows:,} texts are "
        "equal (bfloat16 rounds by the batch). It has no capacity to gain with two stages, and a model this small "
        "leaves no computation to hide its planning behind; docs/results/engine_vs_vllm.md has a larger one."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to standard output
    vllm, vllm_texts = run("vllm", arguments.rows)
    pipemax, pipemax_texts = run("pipemax", arguments.rows)
    equal = sum(vllm_texts[name] == pipemax_texts[name] for name in vllm_texts)
    print_results(Console(), vllm, pipemax, equal)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(vllm), asdict(pipemax)], indent=2) + "\n")


if __name__ == "__main__":
    main()
