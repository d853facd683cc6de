"""Measure what several questions about each document cost: asked together, and asked one by one.

    python lab/bench/ask.py [--json FILE] [--rows 200] [--rounds 3] [--policy vllm|pipemax] [--model examples/model]

Asked together, the questions of a document follow one another, as with ``--ask``; one by one, all documents are read
for the first question, then all for the next, as by a job for each question. Both orders go to the same engine, on this
machine's CPU, in turns, with a KV cache that holds far fewer documents than there are. The documents are rows of the
demo table. One warm-up round is not counted.

The prompt tokens that the engine computed are those of all prompts less those that it found in its KV cache. They do
not depend on the machine's speed; the rates do.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq

from pipemax.api import GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig

QUESTIONS = ("\nSection:", "\nLanguage:", "\nAudience:", "\nKind:")
_TABLE = "examples/data/debian_packages.parquet"
_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Round:
    """One way of asking, once."""

    prompt_tokens: int
    computed_prompt_tokens: int
    completion_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """All rounds of one way of asking."""

    rounds: list[Round]

    @property
    def computed(self) -> float:
        return statistics.median(each.computed_prompt_tokens for each in self.rounds)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens answered for, computed or not."""
        return statistics.median(
            (each.prompt_tokens + each.completion_tokens) / each.seconds for each in self.rounds
        )


def documents(rows: int) -> list[str]:
    table = pq.read_table(_TABLE, columns=["package", "summary", "description"]).slice(0, rows)
    return [
        f"Package: {row['package']}\nSummary: {row['summary']}\nDescription: {row['description']}"
        for row in table.to_pylist()
    ]


def ask(engine: OfflineEngine, prompts: Sequence[str], *, name: str, max_tokens: int) -> Round:
    """Ask these prompts in this order."""
    found_before = _found(engine)
    requests = [
        GenerationRequest(request_id=f"{name}-{i}", prompt=prompt, sampling=Sampling(max_tokens=max_tokens))
        for i, prompt in enumerate(prompts)
    ]
    started_s = time.perf_counter()
    done = list(engine.generate(requests))
    seconds = time.perf_counter() - started_s
    assert all(each.error is None for each in done), next(each.error for each in done if each.error)
    prompt_tokens = sum(each.prompt_tokens for each in done)
    return Round(
        prompt_tokens=prompt_tokens,
        computed_prompt_tokens=prompt_tokens - (_found(engine) - found_before),
        completion_tokens=sum(each.completion_tokens for each in done),
        seconds=seconds,
    )


def _found(engine: OfflineEngine) -> int:
    """Return the prompt tokens that the engine has found in its KV cache since its start."""
    deadline_s = time.monotonic() + _SECONDS
    while time.monotonic() < deadline_s:  # the last step's counts come a moment after its rows
        engine.poll(0.05)
    return round(engine.stats().metrics.get("prefix_cache_hit_tokens", 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--policy", choices=["vllm", "pipemax"], default="vllm")
    parser.add_argument("--model", default="examples/model")
    parser.add_argument("--json", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    config = EngineConfig.parse(
        {
            "model": arguments.model,
            "policy": arguments.policy,
            "max_model_len": 512,
            "max_num_seqs": 16,
            "block_size": 32,
            "cpu_kv_gib": 0.0078,
            "host_kv_gib": 0.0156,
            "calibrate_at_start_s": 0,
        }
    )
    rows = documents(arguments.rows)
    orders = {
        "together": [row + question for row in rows for question in QUESTIONS],
        "one by one": [row + question for question in QUESTIONS for row in rows],
    }
    rounds: dict[str, list[Round]] = {name: [] for name in orders}
    with OfflineEngine(config) as engine:
        for number in range(arguments.rounds + 1):
            for name in sorted(orders, reverse=bool(number % 2)):
                found = ask(engine, orders[name], name=f"{number}-{name}", max_tokens=arguments.max_tokens)
                if number:
                    rounds[name].append(found)
    results = {name: Result(rounds=own) for name, own in rounds.items()}
    print(f"{arguments.rows} documents, {len(QUESTIONS)} questions, policy {arguments.policy}")
    for name, result in results.items():
        asked = result.rounds[0].prompt_tokens
        share = result.computed / asked
        rate = f"{result.tokens_per_s:,.0f} tokens/s answered for"
        print(f"{name:>10}: {result.computed:,.0f} of {asked:,} prompt tokens computed ({share:.1%}), {rate}")
    if arguments.json:
        figures = {name: [asdict(each) for each in result.rounds] for name, result in results.items()}
        arguments.json.write_text(
            json.dumps({**vars(arguments), "json": None, "rounds": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
