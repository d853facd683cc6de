"""PipeMax on Spark compared with other ways to process a table of prompts, on the same model, engine and cores.

    python -m lab.bench.peers [--systems NAME,…] [--lengths skewed,uniform] [--rows 4000] [--repeats 3] [--json FILE]

Every system runs in a process of its own, one after the other, over the same table. The model is the demo model without
an end token, so that each row's answer is as long as the row asks for, which is checked row by row. The engine is stock
vLLM everywhere; the systems differ in how they feed it. Start-up is reported separately. ray_data_llm and distribatch
need `make peers` first.

Results are added to FILE after each system: what was measured stays if another system fails, and a comparison can be
made in pieces, with `--resume` leaving out what FILE has already. `--table FILE` prints the table and measures nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from lab.bench.peers.load import LENGTHS, LOGS, REPOSITORY, Load, write_model, write_table
from lab.bench.peers.recorder import Measurement
from lab.bench.peers.results import Result, add_result, markdown, read_results
from lab.bench.peers.systems import SYSTEMS


def measure(system: str, load: Load, arguments: argparse.Namespace) -> Result:
    """Measure a system in a process of its own; keep what it measured before it failed, if it did."""
    python = arguments.peers_python if SYSTEMS[system].is_peer else Path(sys.executable)
    name = f"{load.lengths}-{system}"
    recorded, log = Path(load.directory) / f"{name}.json", LOGS / f"{name}.log"
    LOGS.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    failure = (
        _run_child(system, load, python, recorded, log, arguments.timeout_s)
        if python.exists()
        else f"there is no {python}: run `make peers`"
    )
    measured = Measurement(**json.loads(recorded.read_text())) if recorded.exists() else Measurement()
    return Result(
        system=system,
        lengths=load.lengths,
        rows=load.rows,
        batch_rows=load.batch_rows,
        **vars(measured),
        load_average=[round(load_before, 1), round(os.getloadavg()[0], 1)],
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
        failure=failure,
    )


def _run_child(
    system: str, load: Load, python: Path, recorded: Path, log: Path, timeout_s: float
) -> str | None:
    """Run a system's process; return why it failed, or None."""
    command = [str(python), "-m", "lab.bench.peers.child", system, load.to_json(), str(recorded)]
    with log.open("w") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=_environment(load), start_new_session=True
        )
        try:
            code = child.wait(timeout_s)
            failure = f"it ended with {code}" if code else None
        except subprocess.TimeoutExpired:
            failure = f"it was stopped after {timeout_s:g} s"
        finally:
            # This ends what a failed system left running, too: it would take cores from the next one.
            _kill_group(child)
    if failure:
        print(
            f"{system}: {failure}; the end of {log}:\n{log.read_text()[-2000:]}", file=sys.stderr, flush=True
        )
    return failure


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def _environment(load: Load) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return inherited | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "engine")]),
        "PIPEMAX_ENGINE_PYTHONPATH": str(REPOSITORY / "engine"),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, load.cores)),
        # Threads that spin while they wait would take cores from the processes that feed the engine.
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def compare(lengths: str, arguments: argparse.Namespace, directory: Path) -> list[Result]:
    load = Load(
        directory=str(directory),
        rows=arguments.rows,
        lengths=lengths,
        repeats=arguments.repeats,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        batch_rows=arguments.batch_rows,
    )
    write_model(load)
    write_table(load)
    known = read_results(arguments.json) if arguments.json and arguments.resume else []
    done = {result.key for result in known if len(result.seconds) >= arguments.repeats}
    results: list[Result] = []
    for system in arguments.systems:
        if (lengths, system, arguments.rows, arguments.batch_rows) in done:
            print(f"{lengths} {system}: is in {arguments.json} already", flush=True)
            continue
        print(f"{lengths} {system}: runs", flush=True)
        results.append(measure(system, load, arguments))
        if arguments.json:
            add_result(arguments.json, results[-1])
        outcome = results[-1].failure or f"{results[-1].seconds} s, start {results[-1].start_s} s"
        print(f"{lengths} {system}: {outcome}", flush=True)
    return results


def _names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def parse_arguments() -> argparse.Namespace:
    systems = "\n".join(f"  {name:26}{system.about}" for name, system in SYSTEMS.items())
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.peers",
        description=__doc__,
        epilog=f"systems:\n{systems}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--systems", type=_names(tuple(SYSTEMS)), default=[*SYSTEMS], help="default: all")
    parser.add_argument(
        "--lengths", type=_names(LENGTHS), default=["skewed", "uniform"], help="default: skewed,uniform"
    )
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument(
        "--batch-rows",
        type=int,
        default=Load.batch_rows,
        help="of all systems, and the engine's max_num_seqs",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=1800, help="for each system's process")
    parser.add_argument("--json", type=Path, help="where the results are kept")
    parser.add_argument("--resume", action="store_true", help="leave out what the file of --json has already")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print this file's results as Markdown, no more"
    )
    parser.add_argument(
        "--peers-python",
        type=Path,
        default=REPOSITORY / ".venv-peers" / "bin" / "python",
        help="of the environment of `make peers`",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.table:
        print(markdown(read_results(arguments.table)))
        return
    # Otherwise a stopped comparison would leave its system running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as directory:
        for lengths in arguments.lengths:
            results += compare(lengths, arguments, Path(directory))
    print("\n" + markdown(read_results(arguments.json) if arguments.json else results))
    sys.exit(any(result.failure for result in results))


if __name__ == "__main__":
    main()
