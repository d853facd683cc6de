"""Measure what each kind of answer costs: a schema, choices, log-probabilities, samples, attempts.

    python lab/bench/answer_cost.py [--json FILE] [--rows 400] [--rounds 5] [--policy vllm|pipemax]

One engine of vLLM on this machine's CPU runs the demo model over the first rows of the demo table, once for each kind
in each round. Kinds take turns, each round begins with another one, and a warm-up round is not counted: it compiles the
grammars. In each run the prompts begin differently, so no run finds another one's prompts in the prefix cache, while
the asks of one row share theirs, as in a job. ``rows/s`` is the figure to compare: kinds differ in how many tokens a
row takes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipemax.api import GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig

_EXAMPLES = Path(__file__).parents[2] / "examples"
_MAX_TOKENS = 24
_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """All rows once."""

    seconds: float
    completion_tokens: int
    rows_error: int
    extra_attempts: int


def kinds() -> dict[str, Sampling]:
    """Return the kinds of answers by name, the one to compare with first."""
    schema = (_EXAMPLES / "section.schema.json").read_text()
    labels = json.loads(schema)["properties"]["section"]["enum"]
    answers = tuple(f'{{"section": "{label}"}}' for label in labels)
    sampled: dict[str, Any] = {"max_tokens": _MAX_TOKENS, "temperature": 0.8, "seed": _SEED}
    greedy: dict[str, Any] = {"max_tokens": _MAX_TOKENS}
    return {
        "plain": Sampling(**greedy),
        "schema": Sampling(response_format=schema, **greedy),
        "regex": Sampling(regex=r'\{"section": "[a-z0-9-]{2,16}"\}', **greedy),
        "choice": Sampling(choice=answers, **greedy),
        "choice, logprobs": Sampling(choice=answers, logprobs=True, **greedy),
        "logprobs": Sampling(logprobs=True, **greedy),
        "sampled": Sampling(**sampled),
        "n=5": Sampling(n=5, **sampled),
        "sampled, schema": Sampling(response_format=schema, **sampled),
        "attempts=3": Sampling(response_format=schema, attempts=3, **sampled),
    }


def prompts(rows: int) -> list[str]:
    table = pq.read_table(_EXAMPLES / "data" / "debian_packages.parquet").slice(0, rows).to_pylist()
    return [
        f"Package: {row['package']}\nSummary: {row['summary']}\nDescription: {row['description']}"
        for row in table
    ]


def run_once(engine: OfflineEngine, texts: Sequence[str], sampling: Sampling, *, name: str) -> Run:
    """Ask for all rows once, with prompts that begin with ``name``."""
    requests = [
        GenerationRequest(request_id=f"{name}:{i}", system=f"Run {name}.", prompt=text, sampling=sampling)
        for i, text in enumerate(texts)
    ]
    started_s = time.perf_counter()
    completions = list(engine.generate(requests))
    return Run(
        seconds=time.perf_counter() - started_s,
        completion_tokens=sum(completion.completion_tokens for completion in completions),
        rows_error=sum(completion.error is not None for completion in completions),
        extra_attempts=sum(completion.attempts - 1 for completion in completions),
    )


def measure(
    engine: OfflineEngine, texts: Sequence[str], asked: Mapping[str, Sampling], *, rounds: int
) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {name: [] for name in asked}
    names = list(asked)
    for number in range(rounds + 1):
        for place in range(len(names)):
            kind = (place + number) % len(names)
            run = run_once(engine, texts, asked[names[kind]], name=f"{number}-{kind}")
            if number:
                runs[names[kind]].append(run)
    return runs


def engine_config(policy: str) -> EngineConfig:
    values: dict[str, Any] = {
        "model": str(_EXAMPLES / "model"),
        "policy": policy,
        "max_model_len": 1_024,
        "max_num_seqs": 64,
        "cpu_kv_gib": 0.5,
    }
    if policy == "pipemax":
        values |= {"pipeline_parallel_size": 2, "block_size": 32}
    return EngineConfig.parse(values)


def table_of(runs: Mapping[str, Sequence[Run]], rows: int) -> list[str]:
    plain_s = statistics.median(run.seconds for run in runs["plain"])
    lines = ["| kind | rows/s, median (min to max) | compared with plain | tokens/row | tokens/s | errors |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, own in runs.items():
        seconds = [run.seconds for run in own]
        median_s = statistics.median(seconds)
        tokens = statistics.median(run.completion_tokens for run in own)
        lines.append(
            f"| {name} | {rows / median_s:,.1f} ({rows / max(seconds):,.1f} to {rows / min(seconds):,.1f}) "
            f"| {plain_s / median_s:.2f} | {tokens / rows:.2f} | {tokens / median_s:,.0f} "
            f"| {statistics.median(run.rows_error for run in own):g} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write every run as JSON")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policy", choices=("vllm", "pipemax"), default="vllm")
    arguments = parser.parse_args()
    texts = prompts(arguments.rows)
    with OfflineEngine(engine_config(arguments.policy)) as engine:
        runs = measure(engine, texts, kinds(), rounds=arguments.rounds)
    print("\n".join(table_of(runs, len(texts))))
    if arguments.json:
        told = {name: [asdict(run) for run in own] for name, own in runs.items()}
        text = json.dumps({"policy": arguments.policy, "rows": len(texts), "runs": told}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
