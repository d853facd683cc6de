"""Stock vLLM and other policies side by side on rows of the demo table: `make compare`.

    python lab/bench/compare_policies.py [--rows 600] [--rounds 1] [--policies vllm pipemax auto] [--json FILE]

All get the same model, stages, KV bytes on each stage and rows; PipeMax has its host pool in addition, and ``auto`` is
told the rows' lengths. Each runs a warm-up of a few rows, then the rounds. A round sends ``--rows`` rows of the table
all at once, and the next round the rows after them. The demo model is tiny and the stages share this machine's cores,
so the figures say how the policies schedule, not what GPUs would do.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from pipemax.api import Completion, GenerationRequest, OfflineEngine, RequestError, Sampling
from pipemax.checkpoint.model_config import load_tokenizer
from pipemax.checkpoint.prompt_encoder import PromptEncoder
from pipemax.config import EngineConfig, Policy

_REPOSITORY = Path(__file__).resolve().parents[2]
_TABLE = _REPOSITORY / "examples" / "data" / "debian_packages.parquet"
_SCHEMA = _REPOSITORY / "examples" / "section.schema.json"
_CONFIG = _REPOSITORY / "conf" / "engines" / "demo.yaml"
_MODEL = _REPOSITORY / "examples" / "model"
_WARM_UP_ROWS = 32
_MAX_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Result:
    """One policy's run."""

    policy: str
    chosen: str
    """What ran: ``auto`` chooses it."""
    rows: int
    """Rows of all rounds."""
    round_s: list[float]
    """Seconds of each round, without the engine's start and the warm-up."""
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
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return sum(self.round_s)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


def demo_requests(rows: int, prefix: str, *, first: int = 0) -> list[GenerationRequest]:
    sampling = Sampling(max_tokens=_MAX_TOKENS, response_format=_SCHEMA.read_text())
    return [
        GenerationRequest(
            request_id=f"{prefix}{i}",
            prompt=f"Package: {row['package']}\nSummary: {row['summary']}\nDescription: {row['description']}",
            sampling=sampling,
        )
        for i, row in enumerate(pq.read_table(_TABLE).slice(first, rows).to_pylist())
    ]


def row_lengths(rows: int) -> dict[str, Any]:
    """Return the lengths of a round's rows, as a job that samples them would tell the engine."""
    config = EngineConfig.load(_CONFIG, model=str(_MODEL))
    encoder = PromptEncoder(
        load_tokenizer(config), chat=config.chat, max_model_len=config.max_model_len or 512
    )
    encoded = encoder.encode(demo_requests(rows, ""))
    prompts = [len(ids) for ids in encoded if not isinstance(ids, RequestError)]
    return {"prompt_tokens": prompts, "max_tokens": _MAX_TOKENS, "rows": rows}


def run(policy: str, rows: int, rounds: int) -> tuple[Result, dict[str, str | None]]:
    """Run one policy; return its figures, and each row's text."""
    told = {"row_lengths": row_lengths(rows)} if policy == "auto" else {}
    config = EngineConfig.load(_CONFIG, model=str(_MODEL), policy=policy, **told)
    begin_s = time.monotonic()
    with OfflineEngine(config) as engine:
        start_s = time.monotonic() - begin_s
        list(engine.generate(demo_requests(_WARM_UP_ROWS, "warm-up-")))
        before = engine.stats().metrics
        round_s, done = [], list[Completion]()
        for number in range(rounds):
            requests = demo_requests(rows, f"{number}-", first=number * rows)
            begin_s = time.monotonic()
            done += engine.generate(requests)
            round_s.append(time.monotonic() - begin_s)
        after = engine.stats().metrics
        chosen = engine.policy_choice.chosen.value
    counts = {name: value - before.get(name, 0.0) for name, value in after.items()}
    result = Result(
        policy=policy,
        chosen=chosen,
        rows=len(done),
        round_s=round_s,
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


def print_results(console: Console, results: Sequence[Result], equal_texts: Mapping[str, int]) -> None:
    stock = results[0]
    table = Table(title=f"{stock.rows} rows of the demo table, the same KV bytes on each of two stages")
    table.add_column("")
    for result in results:
        table.add_column(f"policy: {result.policy}", justify="right")
    lines = {
        "what ran": lambda r: r.chosen,
        "generated tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
        "rows/s": lambda r: f"{r.rows / r.seconds:,.1f}",
        "seconds, engine start apart": lambda r: f"{r.seconds:,.1f} (+ {r.start_s:,.0f} start)",
        "seconds of a round, median (range)": lambda r: (
            f"{median(r.round_s):.2f} ({min(r.round_s):.2f} to {max(r.round_s):.2f})"
        ),
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
        table.add_row(name, *(show(result) for result in results))
    console.print(table)
    for result in results[1:]:
        ratio = result.tokens_per_s / stock.tokens_per_s
        console.print(
            f"policy {result.policy}: {ratio:.2f} times the tokens/s of policy {stock.policy}. "
            f"{equal_texts[result.policy]:,} of {stock.rows:,} texts are equal (bfloat16 rounds by the batch)."
        )
    console.print(
        "PipeMax has no capacity to gain with two stages, and a model this small leaves no computation to hide its "
        "planning behind; lab/results/engine_vs_vllm.md has a larger one."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=[policy.value for policy in Policy],
        default=["vllm", "pipemax"],
        help="the first is what the others are compared with",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM logs to standard output
    results, texts = [], list[dict[str, str | None]]()
    for policy in arguments.policies:
        result, own_texts = run(policy, arguments.rows, arguments.rounds)
        results.append(result)
        texts.append(own_texts)
    equal = {
        result.policy: sum(own[name] == texts[0][name] for name in texts[0])
        for result, own in zip(results, texts, strict=True)
    }
    print_results(Console(), results, equal)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
