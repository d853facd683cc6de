"""Say what a cascade came to, in texts: who answered, and what it cost with and without the small model."""

from collections.abc import Mapping
from typing import Any

from pipemax_spark.report.intervals import share_text
from pipemax_spark.report.row_parts import cut

_MEASURES = ("seconds", "tokens", "cost")
_LEDGER_COUNTS = ("batches", "seen_rows", "differing_rows", "max_misses", "number")
_NO_WORK = {"rows": 0, "seconds": 0.0, "tokens": 0, "cost": 0.0}


def with_costs(facts: Mapping[str, Any], final: Mapping[str, Any], *, is_complete: bool) -> dict[str, Any]:
    """Return the facts with ``costs``: of both models, and of the large one alone by the rate of its own rows.

    ``final`` is the phase that filled the output. The costs are not known if another run has done a part of the
    work, if rows are left, or if the large model answered none.
    """
    phases = {**facts["phases"], "final": final}
    small, of_pilot, again, *large = (
        phases.get(name, _NO_WORK)
        for name in ("small", "pilot_small", "again_labels", "pilot_labels", "labels", "final")
    )
    asked = sum(phase["rows"] for phase in large)
    costs = None
    if is_complete and small["rows"] == facts["rows"] and asked:
        scale = facts["rows"] / asked
        costs = {
            "both": {name: _sum(name, small, of_pilot, again, *large) for name in _MEASURES},
            "large_alone": {
                name: None if (total := _sum(name, *large)) is None else total * scale for name in _MEASURES
            },
        }
    return {**facts, "phases": phases, "costs": costs}


def cascade_facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the report says of a cascade below the certificate's sentence: name and text."""
    rows, kept = facts["rows"], facts["rows_kept"]
    named = [
        (
            "by model",
            f"{kept:,} rows ({kept / rows:.1%}) {cut(facts['small_model'])}, {rows - kept:,} "
            f"({(rows - kept) / rows:.1%}) {cut(facts['large_model'])}",
        )
    ]
    if (costs := facts.get("costs")) is not None:
        with_small, alone = (_cost_text(costs[name]) for name in ("both", "large_alone"))
        named.append(
            (
                "what it took",
                f"{with_small}; the large model alone about {alone}, by the rate of its own rows",
            )
        )
    for name, of_answer in facts.get("questions", {"": facts}).items():
        if "asked_again" in of_answer:
            whose = f"{name}: " if name else ""
            named.append(("large model with itself", f"{whose}{_asked_again(**of_answer['asked_again'])}"))
    return named


def cascade_metrics(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that MLflow gets, by name; with several questions, the bounds have their names."""
    metrics = {f"cascade_{name}": float(facts[name]) for name in ("rows", "rows_kept", "rows_sampled")}
    for name, of_answer in facts.get("questions", {"": facts}).items():
        whose = f"_{name}" if name else ""
        if "ledger" in of_answer:
            metrics |= {
                f"cascade_ledger_{count}{whose}": float(of_answer["ledger"][count])
                for count in _LEDGER_COUNTS
            }
        elif "certificate" in of_answer:
            metrics[f"cascade_max_misses{whose}"] = float(of_answer["certificate"]["max_misses"])
        if (again := of_answer.get("asked_again", {})).get("rows"):
            metrics |= {
                f"cascade_asked_again_{count}{whose}": float(again[count]) for count in ("rows", "same")
            }
    for whose, costs in (facts.get("costs") or {}).items():
        metrics |= {f"cascade_{whose}_{name}": value for name, value in costs.items() if value is not None}
    return metrics


def _sum(name: str, *phases: Mapping[str, Any]) -> float | None:
    values = [phase[name] for phase in phases]
    return None if None in values else sum(values)


def _asked_again(rows: int, same: int) -> str:
    if not rows:
        return "not known: the run has too few rows to ask for some again"
    return f"asked again, {same:,} of {rows:,} rows had the same answer: {share_text(same, rows)}"


def _cost_text(cost: Mapping[str, Any]) -> str:
    price = "" if cost["cost"] is None else f", cost {cost['cost']:,.2f}"
    return f"{cost['seconds'] / 3600:,.2f} h at work, {cost['tokens']:,.0f} tokens{price}"
