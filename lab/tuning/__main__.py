"""Try the tuner of a running engine in simulation, and write a page: ``python -m lab.tuning``.

Everything is kept in ``lab/results/tuning.jsonl`` as it ends, and the same command goes on where it was stopped.
``--seeds N`` is the number of seeds of each setting, ``--hours`` the lengths of the tables. One process.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from lab.tuning.page import write_page
from lab.tuning.planned import planned_limits
from lab.tuning.settings import SETTINGS, Setting
from lab.tuning.trial import HOUR_S, as_pair, regret_of, run_trial
from lab.tuning.truth import Truth, steady_rate, truth_of
from pipemax.domain.step_records import StepLimits

RESULTS = Path(__file__).parents[1] / "results"
KEPT = RESULTS / "tuning.jsonl"
PAGE = RESULTS / "tuning.md"


class Kept:
    """The lines of the file so far, and more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self._truths: dict[str, Truth] = {}

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def find(self, **keys: Any) -> dict[str, Any] | None:
        return next((line for line in self.lines if all(line.get(key) == keys[key] for key in keys)), None)

    def truth(self, setting: Setting) -> Truth:
        if setting.name not in self._truths:
            self._truths[setting.name] = truth_of(setting)
        return self._truths[setting.name]

    def rate(self, setting: Setting, limits: StepLimits, *, is_grid: bool) -> float:
        """Return the true rate under fixed limits, in rows per second."""
        keys = {"kind": "rate", "setting": setting.name, "limits": [*as_pair(limits)]}
        line = self.find(**keys)
        if line is None:
            rate = steady_rate(setting, self.truth(setting), limits)
            line = {**keys, "rate": rate, "grid": is_grid}
            self.add(line)
        return float(line["rate"])


def run_one(kept: Kept, setting: Setting, hours: float, seed: int) -> None:
    keys = {"kind": "trial", "setting": setting.name, "hours": hours, "seed": seed}
    if kept.find(**keys) is not None:
        return
    truth = kept.truth(setting)
    trial = run_trial(setting, truth, hours=hours, seed=seed)
    tuned = trial.tuned
    default = kept.rate(setting, setting.default, is_grid=True)
    best = max(kept.rate(setting, limits, is_grid=True) for limits in setting.grid())
    chosen = kept.rate(setting, tuned.limits, is_grid=False)
    regret = regret_of(trial, table_rows=hours * HOUR_S * default, best=best, default=default, chosen=chosen)
    kept.add(
        {
            **keys,
            "limits": [*as_pair(tuned.limits)],
            "seconds": round(trial.seconds),
            "pairs": tuned.pairs,
            "faults": trial.faults,
            "why": tuned.why,
            "predicted": tuned.predicted_gain,
            "measured": None if tuned.gain is None else [tuned.gain.mean, tuned.gain.low, tuned.gain.high],
            "true": chosen / default - 1,
            "best": best / default - 1,
            "settled": regret.settled,
            "total": regret.total,
            "below_default_s": regret.below_default_s,
        }
    )


def run_best_again(kept: Kept, setting: Setting) -> None:
    """Run the default and the three best of the grid once more, with the rows in another order."""
    grid = [line for line in kept.lines if line["kind"] == "rate" and line["grid"]]
    grid = [line for line in grid if line["setting"] == setting.name]
    for line in [grid[0], *sorted(grid, key=lambda line: float(line["rate"]), reverse=True)[:3]]:
        keys = {"kind": "rate again", "setting": setting.name, "limits": line["limits"]}
        if kept.find(**keys) is None:
            tokens, rows = line["limits"]
            limits = StepLimits(step_tokens=tokens, running_rows=rows)
            kept.add({**keys, "rate": steady_rate(setting, kept.truth(setting), limits, order=2)})


def plan_one(kept: Kept, setting: Setting) -> None:
    keys = {"kind": "planned", "setting": setting.name}
    if kept.find(**keys) is not None:
        return
    rates = {
        name: {"limits": [*as_pair(limits)], "rate": kept.rate(setting, limits, is_grid=False)}
        for name, limits in planned_limits(setting).items()
    }
    kept.add({**keys, **rates})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=9)
    parser.add_argument(
        "--first-seed", type=int, default=100, help="seeds 0 to 9 chose the tuner's constants"
    )
    parser.add_argument("--hours", type=float, nargs="*", default=[1.0, 4.0])
    parser.add_argument(
        "--settings", nargs="*", help="parts of names, such as 8b-h100 or sharegpt; all by default"
    )
    arguments = parser.parse_args()
    kept = Kept(KEPT)
    chosen = [
        setting
        for setting in SETTINGS
        if not arguments.settings or any(part in setting.name for part in arguments.settings)
    ]
    for setting in chosen:
        for limits in setting.grid():
            kept.rate(setting, limits, is_grid=True)
        run_best_again(kept, setting)
        plan_one(kept, setting)
        print(f"{setting.name}: grid of {len(setting.grid())}", flush=True)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for hours in arguments.hours:
            for setting in chosen:
                run_one(kept, setting, hours, seed)
            print(f"seed {seed}, {hours:g} h", flush=True)
    write_page(kept.lines, PAGE)


if __name__ == "__main__":
    main()
