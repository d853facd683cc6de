"""Measure the cost of bad rows: a table, and the same table with one bad row inserted after each 99 good ones.

    python lab/bench/bad_rows.py [--json FILE] [--rows 10000] [--rounds 7] [--tokens-per-s 20000]
    python lab/bench/bad_rows.py --model examples/model --rows 600 --rounds 3

Rows go through the client to the real engine server. By default the server runs the tests' fake engine, which is as
fast as --tokens-per-s says (0: as fast as possible, which leaves only the server and the client); with --model it runs
vLLM on this machine's CPU. Both tables hold the same good rows, so the ratio of their times is the cost. The bad rows
are null, blank, too long, not UTF-8 and with a NaN temperature in turn. Rounds alternate; one warm-up round is not
counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipemax.wire import OVERRIDES_TYPE, REQUEST_SCHEMA, GenerationSpec
from pipemax_spark.executor.client import EngineOptions, complete
from pipemax_spark.executor.server_process import EXECUTOR_VARIABLE
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import fake_config

_BATCH_ROWS = 1_000
_GOOD_PER_BAD = 99
_MAX_TOKENS = 16
_TOO_LONG = b"word " * 8_192
_BAD: tuple[tuple[bytes | None, float | None], ...] = (
    (None, None),
    (b" \n", None),
    (_TOO_LONG, None),
    (b"caf\xe9", None),
    (b"a prompt", float("nan")),
)
"""The bad rows, as (prompt, temperature)."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Seconds of each round, and how much longer the median round with bad rows took."""

    good_rows: int
    bad_rows: int
    clean_s: list[float]
    poisoned_s: list[float]

    @property
    def cost(self) -> float:
        return statistics.median(self.poisoned_s) / statistics.median(self.clean_s) - 1


def table(rows: int, *, is_poisoned: bool) -> list[tuple[bytes | None, float | None]]:
    """Return (prompt, temperature) of each row; if ``is_poisoned``, with bad rows among them."""
    made: list[tuple[bytes | None, float | None]] = []
    for i in range(rows):
        made.append((f"Package: number {i}, a library for the {i % 97}th time".encode(), None))
        if is_poisoned and i % _GOOD_PER_BAD == _GOOD_PER_BAD - 1:
            made.append(_BAD[i // _GOOD_PER_BAD % len(_BAD)])
    return made


def batches(rows: list[tuple[bytes | None, float | None]]) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(rows), _BATCH_ROWS):
        part = rows[first : first + _BATCH_ROWS]
        # Bytes taken for text without a check, as Spark hands them over.
        prompts = pa.array([prompt for prompt, _ in part], pa.binary()).view(pa.string())
        overrides = [None if t is None else {"temperature": t} for _, t in part]
        columns = [
            pa.array(range(first, first + len(part)), pa.int64()),
            prompts,
            *(pa.nulls(len(part), REQUEST_SCHEMA.field(name).type) for name in ("messages", "images")),
            pa.array(overrides, OVERRIDES_TYPE),
            *(pa.nulls(len(part), REQUEST_SCHEMA.field(name).type) for name in ("question", "fault")),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=REQUEST_SCHEMA)


def run_round(rows: list[tuple[bytes | None, float | None]], options: EngineOptions) -> tuple[float, int]:
    """Send all rows once; return the seconds and the number of error rows."""
    started_s, done, errors = time.perf_counter(), 0, 0
    for completions in complete(batches(rows), options, task="bad rows"):
        done += completions.num_rows
        errors += completions.num_rows - completions.column("error_code").null_count
    assert done == len(rows), f"{done} of {len(rows)} rows came back"
    return time.perf_counter() - started_s, errors


def measure(options: EngineOptions, *, rows: int, rounds: int) -> Result:
    clean, poisoned = table(rows, is_poisoned=False), table(rows, is_poisoned=True)
    bad_rows = len(poisoned) - len(clean)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        # Each kind goes first in every other round.
        for is_poisoned in sorted(seconds, reverse=number % 2 == 1):
            took_s, errors = run_round(poisoned if is_poisoned else clean, options)
            assert errors == (bad_rows if is_poisoned else 0), f"{errors} error rows"
            if number:
                seconds[is_poisoned].append(took_s)
    return Result(good_rows=rows, bad_rows=bad_rows, clean_s=seconds[False], poisoned_s=seconds[True])


def engine_options(directory: Path, model: str | None, tokens_per_s: float) -> EngineOptions:
    config: dict[str, Any]
    if model is None:
        config = fake_config(max_num_seqs=256, tokens_per_s=tokens_per_s or None)
        engine_python = write_engine_python(directory / "python")
    else:
        config = {
            "model": str(Path(model).absolute()),
            "max_model_len": 1_024,
            "max_num_seqs": 32,
            "cpu_kv_gib": 0.5,
        }
        engine_python = sys.executable
    return EngineOptions(
        engine=config,
        generation=GenerationSpec(max_tokens=_MAX_TOKENS),
        job_id="bad-rows",
        engine_python=engine_python,
        log_dir=str(directory),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the seconds as JSON")
    parser.add_argument("--rows", type=int, default=10_000, help="good ones (default 10000)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens-per-s", type=float, default=20_000)
    parser.add_argument("--model", help="a checkpoint's directory, for vLLM instead of the fake engine")
    arguments = parser.parse_args()
    # A stand-in for the executor's JVM: the server ends with it.
    executor = subprocess.Popen(["sleep", "infinity"])
    os.environ[EXECUTOR_VARIABLE] = str(executor.pid)
    with tempfile.TemporaryDirectory() as directory:
        try:
            options = engine_options(Path(directory), arguments.model, arguments.tokens_per_s)
            result = measure(options, rows=arguments.rows, rounds=arguments.rounds)
        finally:
            executor.kill()
            executor.wait()
    for name, seconds in (("clean", result.clean_s), ("with bad rows", result.poisoned_s)):
        rate = result.good_rows / statistics.median(seconds)
        print(
            f"{name:>14}: {rate:,.0f} good rows/s in the median, {min(seconds):.2f} to {max(seconds):.2f} s"
        )
    print(f"{result.bad_rows:,} bad rows among {result.good_rows:,} good ones cost {result.cost:+.1%}")
    if arguments.json:
        text = json.dumps({**asdict(result), "cost": result.cost}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
