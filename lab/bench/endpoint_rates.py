"""Measure a job over one vLLM server next to the job with the engine itself: the same rows, model and settings.

    python lab/bench/endpoint_rates.py [--json FILE] [--rounds 5] [--rows 4000] [--lengths skewed] [--engine-cores 1]
                                       [--seqs 64] [--model demo]

The prompts, their output lengths and vLLM's settings are those of ``lab.bench.peers``. Both sides are ``annotate()``
over two slots to a Delta table, so that they differ only in where the rows go: to vLLM in the engine server, or by HTTP
to vLLM's own server on the loopback. All servers are started first, and stay. A run of each side is not counted: in it
the endpoint's engine finds how many requests to have open. A round is then a run of each side, after one of a few rows
that is not counted either; the endpoint begins every other round. ``ratio`` is the median of the rounds' ratios of
rows/s. A round ends the command if its rows were not all computed, by the engines' own counts, if more than two answers
of a hundred differ, or if its ratio cannot be.

On a GPU node the model does not compute on the cores that Spark and HTTP run on. On a CPU it does: both sides' compute
threads have ``--engine-cores`` cores, one by default, and everything else has what is left; with 0 all compete for all
cores, and the ratio counts HTTP's CPU time against the endpoint. The demo model is so small that a request's HTTP takes
about as much of a core as its tokens; ``--model medium`` is a random one of 90 million parameters, of which a row takes
a tenth of a second (try ``--rows 150``). Each line of output is a JSON object.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from pyarrow import flight

from lab.bench.overhead_turns import Run
from lab.bench.peers.engines import flags
from lab.bench.peers.load import LENGTHS, Load, write_model, write_table
from lab.bench.spark_overhead import WARM_UP_ROWS, run_spark, spark_session, split
from pipemax.wire import ProcessIdentity, ServerAction, ServerStats
from pipemax_spark.executor.server_process import Executor, connect, server_files
from tests.endpoints.servers import KEY, SERVED_NAME, vllm_server
from tests.parity.make_model import MEDIUM, vary

MOST_RATIO = 1.3
"""The server runs the same vLLM, so it cannot be faster; a machine that changes its speed gave up to 1.21 between two
runs (lab/results/spark_overhead.md)."""
MOST_DIFFERENT = 0.02
"""Share of the answers: the sides batch rows differently, and then float32's rounding can decide between two tokens."""
KEY_VARIABLE = "ENDPOINT_RATES_KEY"
PAUSE_S = 2.0
"""Pause before each run: a worker of vLLM spins for a second after its last step."""


@dataclass(frozen=True, kw_only=True)
class ServedLoad(Load):
    """The load, for an endpoint."""

    url: str

    def pipemax_engine(self) -> dict[str, Any]:
        return {
            "endpoint": self.url,
            "model": SERVED_NAME,
            "unpinned_model": True,
            "api_key_env": KEY_VARIABLE,
            "chat": "never",
        }


@dataclass(frozen=True, kw_only=True)
class Round:
    """One run of each side."""

    itself: Run
    endpoint: Run

    @property
    def ratio(self) -> float:
        """The endpoint's rows/s in those of the engine itself: both answer the same rows."""
        return self.itself.seconds / self.endpoint.seconds

    @property
    def different(self) -> int:
        """Answers that the other side does not have."""
        return (self.itself.texts - self.endpoint.texts).total()


def check_round(done: Round, tokens: int) -> None:
    """Raise ``ValueError`` if a run did not compute the load's tokens, if answers differ, or for such a ratio."""
    for name, run in (("the engine itself", done.itself), ("the endpoint", done.endpoint)):
        if run.tokens != tokens or run.computed_tokens != tokens:
            raise ValueError(
                f"{name} computed {run.computed_tokens:,} output tokens, its answers have {run.tokens:,}, and the rows "
                f"ask for {tokens:,}: the run measures something else, such as a cache of answers"
            )
    if done.different > MOST_DIFFERENT * done.itself.texts.total():
        raise ValueError(f"{done.different:,} answers of the endpoint are not those of the engine itself")
    if done.ratio > MOST_RATIO:
        raise ValueError(
            f"the endpoint was {done.ratio:.2f} times as fast as the engine itself ({done.endpoint.seconds:.1f} s and "
            f"{done.itself.seconds:.1f} s), and it cannot be faster: something slowed the engine down"
        )


def endpoint_engine_python(directory: Path) -> str:
    """Write a Python for the endpoint's engine server: an executor has one for each, and both must stay."""
    path = directory / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def engine_metrics(jvm_pid: int, engine_python: str | None) -> dict[str, Any]:
    """Return the metrics of a JVM's engine server with this Python."""
    executor = Executor(process=ProcessIdentity.of(jvm_pid), daemon=ProcessIdentity.of_this_process())
    with connect(server_files(executor, engine_python, None)) as client:
        action = flight.Action(ServerAction.STATS, b"")
        (answer,) = client.do_action(action, flight.FlightCallOptions(timeout=5))
    return dict(ServerStats.from_bytes(answer.body.to_pybytes()).engine_metrics)


def measured(few: Callable[[], Run], run: Callable[[], Run], computed_tokens: Callable[[], int]) -> Run:
    """Do a run after a short one of the same kind and a pause; return it with what its engine counted."""
    few()
    time.sleep(PAUSE_S)
    before = computed_tokens()
    busy_before_s = _busy_s()
    done = run()
    return replace(done, busy_cpu_s=_busy_s() - busy_before_s, computed_tokens=computed_tokens() - before)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


@contextmanager
def sides(load: Load) -> Iterator[tuple[Callable[[], Run], Callable[[], Run], Callable[[], int]]]:
    """Yield a run with the engine itself, one over the endpoint, and the endpoint's level; both are warm."""
    directory = Path(load.directory)
    arguments = {name: value for name, value in load.vllm_arguments().items() if name != "model"}
    with (
        vllm_server(directory, *flags(arguments), model=Path(load.model)) as server,
        spark_session(directory) as spark,
    ):
        frame = spark.read.parquet(str(directory / "in"))
        jvm_pid = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
        served = ServedLoad(**vars_of(load), url=server.url)
        python = endpoint_engine_python(directory)
        seeds = count(1)

        def side(one: Load, name: str, engine_python: str | None, counter: str) -> Callable[[], Run]:
            few_rows = frame.limit(WARM_UP_ROWS)
            few = partial(run_spark, one, few_rows, directory / f"{name}-few", seeds, engine_python)
            run = partial(run_spark, one, frame, directory / name, seeds, engine_python)
            run()  # all rows: an endpoint's engine finds the level of open requests meanwhile
            return partial(measured, few, run, lambda: int(engine_metrics(jvm_pid, engine_python)[counter]))

        yield (
            side(load, "itself", None, "output_tokens"),
            side(served, "endpoint", python, "endpoint_output_tokens"),
            lambda: int(engine_metrics(jvm_pid, python)["endpoint_level"]),
        )


def vars_of(load: Load) -> dict[str, Any]:
    return {name: getattr(load, name) for name in load.__dataclass_fields__}


def write_medium_model(load: Load) -> None:
    """Put a larger random model in the place of the demo model, with its tokenizer and 25 kB of KV a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shapes = MEDIUM | {"num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(load.model, **shapes))
    vary(model)
    model.float().save_pretrained(load.model)


def rounds(load: Load, number: int, model: str) -> Iterator[tuple[Round, int]]:
    """Yield each round as it ends, checked, and the level of open requests that the endpoint has found."""
    write_model(load)
    if model == "medium":
        write_medium_model(load)
    write_table(load)
    split(load, Path(load.directory) / "in")
    tokens = sum(row["max_tokens"] for row in load.prompts())
    with sides(load) as (itself, endpoint, level):
        for turn in range(number):
            if turn % 2:
                second = endpoint()
                done = Round(itself=itself(), endpoint=second)
            else:
                first = itself()
                done = Round(itself=first, endpoint=endpoint())
            check_round(done, tokens)
            yield done, level()


def line_of(done: Round, load: Load, level: int) -> dict[str, Any]:
    return {
        "ratio": round(done.ratio, 4),
        "itself_rows_per_s": round(load.rows / done.itself.seconds, 1),
        "endpoint_rows_per_s": round(load.rows / done.endpoint.seconds, 1),
        "itself_busy_cpu_s": round(done.itself.busy_cpu_s, 1),
        "endpoint_busy_cpu_s": round(done.endpoint.busy_cpu_s, 1),
        "level": level,
        "different": done.different,
    }


def summary_of(lines: list[dict[str, Any]], load: Load, engine_cores: str) -> dict[str, Any]:
    def spread(name: str) -> dict[str, float]:
        values = [line[name] for line in lines]
        return {"median": median(values), "min": min(values), "max": max(values)}

    return {
        "rounds": len(lines),
        **{name: spread(name) for name in ("ratio", "itself_rows_per_s", "endpoint_rows_per_s")},
        "rows": load.rows,
        "lengths": load.lengths,
        "seqs": load.batch_rows,
        "cores": len(load.cores),
        "engine_cores": engine_cores,
        "machine": platform.processor() or platform.machine(),
        "load_average": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the lines here, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4_000)
    parser.add_argument("--lengths", choices=LENGTHS, default="skewed", help="of the answers")
    parser.add_argument(
        "--engine-cores", type=int, default=1, help="that either side's model computes on; 0: all"
    )
    parser.add_argument("--model", choices=("demo", "medium"), default="demo")
    parser.add_argument("--seqs", type=int, default=64, help="rows that vLLM runs at once")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    own = cores[-arguments.engine_cores :] if arguments.engine_cores else cores
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound = ",".join(map(str, own))
    os.environ |= {KEY_VARIABLE: KEY, "PYSPARK_PYTHON": sys.executable}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        load = Load(
            directory=directory,
            rows=arguments.rows,
            lengths=arguments.lengths,
            repeats=arguments.rounds,
            cores=tuple(cores),
            batch_rows=arguments.seqs,
        )
        for done, level in rounds(load, arguments.rounds, arguments.model):
            lines.append(line_of(done, load, level))
            print(json.dumps(lines[-1]), flush=True)
    lines.append(summary_of(lines, load, bound) | {"model": arguments.model})
    print(json.dumps(lines[-1]))
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
