"""The tuner's choice against a grid of limits, on this machine's CPU: one engine of stock vLLM, whose limits change.

    python lab/bench/tuner_on_cpu.py --json FILE [--rounds 5] [--seconds 5] [--gpu-blocks 400] [--lengths sharegpt]

The model is that of ``engine_vs_vllm.py``, with 93 million parameters in float32, in one stage. First the engine tunes
itself as in a job, in shorter blocks, on rows that never end; then each round measures all 16 pairs of limits and the
tuner's choice in a random order, after a third of the time in which nothing is measured. What slows the machine for
some minutes so slows all of them. A rate is the work of the steps per second, with the weights of prompt and output
tokens that the tuner has fitted: in so short a time output tokens alone would say which pair was busy with prompts.
The table at the end gives medians with the least and the most, in hundredths of the best median, and the regret: how
far the choice is below the pair with the best median, which is the luckiest of 16 too.

A measurement is written to FILE at once, as a line of JSON; started again with it, the script goes on where it ended.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from lab.bench.engine_vs_vllm import Load, engine_config, make_requests
from pipemax.api import Completion, GenerationRequest, OfflineEngine
from pipemax.config import EngineConfig
from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.serve.flow.live_tuning import LiveTuning
from pipemax.tuning.remembered import Entry, load_entries
from pipemax.tuning.rules import TuningRules
from pipemax.tuning.step_fit import WorkCosts
from tests.parity.make_model import MEDIUM, make_model

STEP_TOKENS = (64, 128, 256, 512)
RUNNING_ROWS = (8, 16, 32, 64)
GRID = [StepLimits(step_tokens=tokens, running_rows=rows) for tokens in STEP_TOKENS for rows in RUNNING_ROWS]
RULES = TuningRules(max_s=150.0, least_table_s=1.0, sweep_setting_s=3.0, block_s=8.0)
"""Shorter than a job's, whose step times are far less noisy in a second: there are few steps on a CPU."""
IN_FLIGHT = 3 * max(RUNNING_ROWS)
DIFFERENT_ROWS = 2_000
_ANSWER_S = 0.3


class EndlessTable:
    """What a tuning asks of the open streams."""

    def jobs(self) -> frozenset[str]:
        return frozenset({"bench"})

    def share_left(self) -> int:
        return 1_000_000

    def traits(self) -> frozenset[str]:
        return frozenset()


class Running:
    """An engine that never runs out of rows."""

    def __init__(self, engine: OfflineEngine, lengths: str) -> None:
        self._engine = engine
        self._rows = self._endless(make_requests(Load(lengths=lengths, prompts="plain"), DIFFERENT_ROWS))
        self._in_flight = 0

    def step(self) -> list[Completion]:
        """Send rows in place of those that have ended, and return those that end."""
        if missing := IN_FLIGHT - self._in_flight:
            self._engine.submit([next(self._rows) for _ in range(missing)])
            self._in_flight = IN_FLIGHT
        ended = self._engine.poll(0.05)
        self._in_flight -= len(ended)
        return ended

    def tuned(self, config: EngineConfig) -> tuple[Entry, str]:
        """Let the engine tune itself; return what it remembers of that, and what the tuning says."""
        tuning = LiveTuning(EndlessTable(), rules=RULES)
        while not tuning.note:
            tuning.learn(self.step())
            tuning.see(self._engine, config)
        facts = self._engine.tuning_facts()
        assert facts is not None
        (entry,) = load_entries(Path(facts.kept_in))
        return entry, tuning.note

    def rate(self, limits: StepLimits, costs: WorkCosts, seconds: float) -> float:
        """Return the work per second of the steps in the last two thirds of the time."""
        self._engine.set_limits([limits])
        self._run_for(seconds / 3)
        self._steps()
        self._run_for(seconds * 2 / 3)
        steps = self._steps()
        return costs.work_s(steps) / float(np.nansum(steps.seconds))

    def _run_for(self, seconds: float) -> None:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            self.step()

    def _steps(self) -> StepRecords:
        """Return all steps since the last call. The scheduler answers between two steps."""
        (first,) = self._engine.take_step_records()
        self._run_for(_ANSWER_S)
        (second,) = self._engine.take_step_records()
        return StepRecords.joined([first, second])

    @staticmethod
    def _endless(requests: Sequence[GenerationRequest]) -> Iterator[GenerationRequest]:
        number = 0
        while True:
            for request in requests:
                yield replace(request, request_id=str(number))
                number += 1


def measure(model: str, journal: Path, arguments: argparse.Namespace) -> None:
    """Write the choice and all measurements that the journal lacks."""
    written = lines_of(journal)
    done = {(line["round"], line["name"]) for line in written if "rate" in line}
    config = engine_config(model, f"vllm_{max(STEP_TOKENS)}", 1, arguments.gpu_blocks)
    with OfflineEngine(config) as engine, journal.open("a", encoding="utf-8") as file:

        def write(**values: Any) -> None:
            print(json.dumps(values), file=file, flush=True)

        running = Running(engine, arguments.lengths)
        tuned = next((line for line in written if "choice" in line), None)
        if tuned is None:
            begin_s = time.perf_counter()
            entry, note = running.tuned(config)
            seconds = time.perf_counter() - begin_s
            tuned = {"choice": asdict(entry.limits), "costs": asdict(entry.costs), "note": note}
            write(**tuned, seconds=seconds)
            print(note, flush=True)
        choice, costs = StepLimits(**tuned["choice"]), WorkCosts(**tuned["costs"])
        cells = [*((name_of(limits), limits) for limits in GRID), ("tuner", choice)]
        for round_ in range(arguments.rounds):
            for name, limits in Random(round_).sample(cells, len(cells)):
                if (round_, name) not in done:
                    rate = running.rate(limits, costs, arguments.seconds)
                    write(round=round_, name=name, rate=rate, load=os.getloadavg()[0])
            print(f"round {round_ + 1} of {arguments.rounds}", flush=True)


def name_of(limits: StepLimits) -> str:
    return f"{limits.step_tokens:>4} tokens {limits.running_rows:>3} rows"


def lines_of(journal: Path) -> list[dict[str, Any]]:
    if not journal.exists():
        return []
    return [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rates, the best first, and the regret of the choice."""
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    for line in lines:
        if "rate" in line:
            rates[line["name"]][line["round"]] = line["rate"]
    by_median = sorted(rates, key=lambda name: -median(rates[name].values()))
    best = next(name for name in by_median if name != "tuner")
    unit = median(rates[best].values()) / 100
    shown = [f"{'limits':<20} {'median':>8} {'least':>8} {'most':>8}"]
    for name in by_median:
        values = [rate / unit for rate in rates[name].values()]
        shown.append(f"{name:<20} {median(values):>8.1f} {min(values):>8.1f} {max(values):>8.1f}")
    both = sorted(rates["tuner"].keys() & rates[best].keys())
    ratios = [rates["tuner"][round_] / rates[best][round_] for round_ in both]
    regret = 1 - median(rates["tuner"].values()) / median(rates[best].values())
    tuned = next(line for line in lines if "choice" in line)
    choice = name_of(StepLimits(**tuned["choice"]))
    return [
        *shown,
        f"the tuner's choice: {choice}, in {tuned['seconds']:.0f} s ({tuned['note']})",
        f"regret {regret:.1%}; round by round, {min(ratios):.3f} to {max(ratios):.3f} times the best's rate",
    ]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--gpu-blocks", type=int, default=400)
    parser.add_argument("--lengths", choices=("uniform", "sharegpt"), default="sharegpt")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"  # nothing is remembered
        model = Path(directory) / "model"
        make_model(model, MEDIUM)
        measure(str(model), arguments.json, arguments)
    print("\n".join(table(lines_of(arguments.json))))


if __name__ == "__main__":
    main()
