"""Write the page of results from the lines that were kept.

Trials of an earlier version of the tuner are kept as ``"kind": "earlier trial"``.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
END = "<!-- what follows is written by python -m lab.tuning -->"


def write_page(lines: Sequence[Line], path: Path) -> None:
    """Replace what follows ``END`` in the page; what stands before is written by hand."""
    written = path.read_text(encoding="utf-8").partition(END)[0] if path.exists() else ""
    bests = _bests(lines)
    trials = [_against(bests, line) for line in lines if line["kind"] == "trial"]
    earlier = [_against(bests, line) for line in lines if line["kind"] == "earlier trial"]
    parts = [written.rstrip(), "", END, ""]
    for hours in sorted({line["hours"] for line in trials}):
        these = [line for line in trials if line["hours"] == hours]
        parts += [
            f"## Tables of {hours:g} hour{'s' * (hours != 1)}",
            "",
            *_gates(these, [line for line in earlier if line["hours"] == hours]),
            "",
            *_by_setting(these),
            "",
        ]
    parts += ["## What `plan-capacity` would set", "", *_planned(lines, bests, trials), ""]
    parts += ["## The grid", "", *_grid(lines)]
    path.write_text("\n".join(parts).strip() + "\n", encoding="utf-8")


def _bests(lines: Iterable[Line]) -> dict[str, float]:
    """Return each setting's gain of the grid's best limits over the default, which is the grid's first.

    The best ones and the default were run twice, with the rows in two orders: the mean of both gains counts.
    """
    runs: dict[str, dict[str, dict[tuple[int, ...], float]]] = {"rate": {}, "rate again": {}}
    for line in lines:
        if line["kind"] == "rate again" or (line["kind"] == "rate" and line["grid"]):
            of_setting = runs[line["kind"]].setdefault(line["setting"], {})
            of_setting[tuple(line["limits"])] = line["rate"]
    bests = {}
    for setting, rates in runs["rate"].items():
        default, again = next(iter(rates)), runs["rate again"].get(setting, {})
        twice = [
            (rates[limits] / rates[default] + again[limits] / again[default]) / 2 - 1 for limits in again
        ]
        bests[setting] = max(twice or [rate / rates[default] - 1 for rate in rates.values()])
    return bests


def _against(bests: Mapping[str, float], line: Line) -> Line:
    """Return a trial with its regrets against the best of the whole grid, of which it may have known a part."""
    better = (1 + bests[line["setting"]]) / (1 + line["best"])
    return {
        **line,
        "best": bests[line["setting"]],
        "settled": 1 - (1 - line["settled"]) / better,
        "total": (1 + line["total"]) * better - 1,
    }


def _gates(trials: Sequence[Line], earlier: Sequence[Line]) -> list[str]:
    def share(holds: Callable[[Line], bool], trials: Sequence[Line]) -> str:
        return f"{sum(map(holds, trials))} of {len(trials)} ({statistics.fmean(map(holds, trials)):.1%})"

    hours = trials[0]["hours"]
    allowed_s = 30 + 0.01 * hours * 3600
    conditions: list[tuple[str, Callable[[Line], bool]]] = [
        ("settled within 2 % of the grid's best", lambda one: one["settled"] <= 0.02),
        ("the whole table within 3 % of the grid's best", lambda one: one["total"] <= 0.03),
        (
            "no slower than the default by more than 30 s and 1 %",
            lambda one: one["below_default_s"] <= allowed_s,
        ),
        ("settled no slower than the default", lambda one: one["true"] >= -1e-9),
    ]
    return [
        "| what should hold | trials in which it holds | with the tuner before |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {share(holds, trials)} | {share(holds, earlier) if earlier else ''} |"
            for name, holds in conditions
        ),
    ]


def _by_setting(trials: Sequence[Line]) -> list[str]:
    rows = [
        "| engine, table | trials | best of the grid | settled on | regret settled | regret total | s | raced | why |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for setting in dict.fromkeys(line["setting"] for line in trials):
        these = [line for line in trials if line["setting"] == setting]

        def middle(name: str, these: Sequence[Line] = these) -> str:
            values = [float(line[name]) for line in these]
            text = f"{100 * statistics.median(values):.1f}"
            spread = max(values) - min(values)
            return text if spread < 0.0005 else f"{text} ({100 * min(values):.1f} … {100 * max(values):.1f})"

        reasons = [line["why"] for line in these]
        usual = max(set(reasons), key=reasons.count)
        raced = sum(line["pairs"] > 0 for line in these)
        seconds = statistics.median(line["seconds"] for line in these)
        rows.append(
            f"| {setting.replace('/', ', ')} | {len(these)} | {middle('best')} % | {middle('true')} % "
            f"| {middle('settled')} % | {middle('total')} % | {seconds:.0f} | {raced} | {usual} |"
        )
    return rows


def _planned(lines: Iterable[Line], bests: Mapping[str, float], trials: Sequence[Line]) -> list[str]:
    """Return gains over vLLM's default: of the plan's steps with two numbers of rows, of the grid and of the tuner."""
    rows = [
        "| engine, table | its steps | with vLLM's rows | with 1,024 rows | best of the grid | the tuner |"
    ]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    defaults: dict[str, float] = {}
    for line in lines:
        if line["kind"] == "rate":
            defaults.setdefault(line["setting"], line["rate"])
    for line in lines:
        if line["kind"] == "planned":
            name = line["setting"]
            gains = [line[kind]["rate"] / defaults[name] - 1 for kind in ("set", "simulated")]
            tuned = [one["true"] for one in trials if one["setting"] == name and one["hours"] == 1]
            gains += [bests[name], statistics.median(tuned)] if tuned else [bests[name]]
            cells = " | ".join(f"{gain:+.1%}" for gain in gains)
            rows.append(f"| {name.replace('/', ', ')} | {line['set']['limits'][0]:,} | {cells} |")
    return rows


def _grid(lines: Iterable[Line]) -> list[str]:
    rows = ["| engine, table | points | default | best | best over default | worst over default |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    points: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] == "rate" and line["grid"]:
            points.setdefault(line["setting"], []).append(line)
    for setting, these in points.items():
        default, rates = these[0], [float(line["rate"]) for line in these]
        best = max(these, key=lambda line: float(line["rate"]))
        rows.append(
            f"| {setting.replace('/', ', ')} | {len(these)} | {_limits(default)} | {_limits(best)} "
            f"| {best['rate'] / default['rate'] - 1:+.1%} | {min(rates) / default['rate'] - 1:+.1%} |"
        )
    return rows


def _limits(line: Line) -> str:
    tokens, rows = line["limits"]
    return f"{tokens:,} / {rows:,}"
