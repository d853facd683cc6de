"""Rows per second of PipeMax on Spark, the bare engine, ``vllm run-batch`` and plain UDFs on one table.

    python -m bench.peers [--rows 2000] [--repeats 3] [--lengths skewed uniform] [--systems NAME ...] [--json FILE]

The same random model of 6 million parameters in float32, the same engine arguments, the same cores for all; every
system in a process of its own, one after the other. The engine is stock vLLM everywhere: what differs is how it is
fed. Start-up is reported apart. Each figure is the median of the repeats, with their spread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.peers.load import Load, write_table
from bench.peers.systems import SYSTEMS, Measurement
from tests.parity.make_model import SMALL, make_model

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    system: str
    lengths: str
    rows: int
    engines: int
    start_s: float
    seconds: list[float]
    output_tokens: int
    rows_per_s: float
    spread: float
    """(slowest − fastest) / median."""
    ratio_to_bare_engine: float | None


def measure(load: Load, system: str, log: Path) -> Measurement:
    """In a process of its own, whose output goes to ``log``."""
    command = [sys.executable, "-m", "bench.peers", "--run", system, "--load", load.to_json()]
    result = Path(load.directory) / "result.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "engine")])}
    with log.open("w") as output:
        done = subprocess.run(
            [*command, "--json", result],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{system} ended with {done.returncode}; its last lines:\n{log.read_text()[-2000:]}")
    return Measurement(**json.loads(result.read_text()))


def compare(lengths: str, arguments: argparse.Namespace, directory: Path) -> list[Result]:
    load = Load(
        directory=str(directory),
        rows=arguments.rows,
        lengths=lengths,
        repeats=arguments.repeats,
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    write_table(load)
    results: list[Result] = []
    for system in arguments.systems:
        measured = measure(load, system, directory / f"{system}.log")
        run_s = median(measured.seconds)
        bare = next((result for result in results if result.system == "bare_engine"), None)
        results.append(
            Result(
                system=system,
                lengths=lengths,
                rows=load.rows,
                engines=measured.engines,
                start_s=round(measured.start_s, 1),
                seconds=[round(seconds, 2) for seconds in measured.seconds],
                output_tokens=measured.output_tokens,
                rows_per_s=round(load.rows / run_s, 2),
                spread=round((max(measured.seconds) - min(measured.seconds)) / run_s, 3),
                ratio_to_bare_engine=round(load.rows / run_s / bare.rows_per_s, 3) if bare else None,
            )
        )
        print(_line(results[-1]), flush=True)
    return results


def _line(result: Result) -> str:
    ratio = (
        ""
        if result.ratio_to_bare_engine is None
        else f"  ×{result.ratio_to_bare_engine:.2f} of the bare engine"
    )
    return (
        f"{result.lengths:8} {result.system:26} {result.engines} engine(s)  {result.rows_per_s:8.1f} rows/s "
        f"±{result.spread / 2:.0%}  start {result.start_s:5.1f} s  {result.output_tokens:,} tokens{ratio}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], prog="python -m bench.peers")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", choices=("skewed", "uniform"), default=["skewed", "uniform"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--run", choices=SYSTEMS, help=argparse.SUPPRESS)  # this process is to be measured
    parser.add_argument("--load", type=Load.from_json, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        arguments.json.write_text(json.dumps(asdict(SYSTEMS[arguments.run](arguments.load))))
        return
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory) / "model", SMALL)
        for lengths in arguments.lengths:
            results += compare(lengths, arguments, Path(directory))
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
