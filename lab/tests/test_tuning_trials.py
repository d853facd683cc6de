"""Trials of the tuner in simulation, and what their page counts."""

from dataclasses import replace
from pathlib import Path

import pytest

from lab.tuning.page import write_page
from lab.tuning.settings import Setting
from lab.tuning.trial import run_trial
from lab.tuning.truth import truth_of


def test_a_trial_without_enough_rows_ends_with_an_error() -> None:
    setting = Setting(engine="gpt-oss-20b-h100", table="classify")
    few = replace(truth_of(setting), rows_per_s=0.0)
    with pytest.raises(RuntimeError, match="no row is left"):
        run_trial(setting, few, hours=1.0, seed=0)


def test_the_best_of_the_grid_is_the_best_mean_of_the_points_that_ran_twice(tmp_path: Path) -> None:
    def rate(kind: str, rows: int, value: float) -> dict[str, object]:
        return {"kind": kind, "setting": "1b-l4/classify", "limits": [64, rows], "rate": value, "grid": True}

    lines = [rate("rate", 1, 100.0), rate("rate", 2, 110.0), rate("rate", 3, 108.0)]
    lines += [rate("rate again", 1, 100.0), rate("rate again", 2, 100.0), rate("rate again", 3, 104.0)]
    trial = {"kind": "trial", "setting": "1b-l4/classify", "hours": 1.0, "limits": [64, 3], "pairs": 1}
    figures = {
        "settled": 0.02,
        "total": 0.02,
        "best": 0.1,
        "true": 0.08,
        "seconds": 100.0,
        "below_default_s": 0,
    }
    write_page([*lines, {**trial, **figures, "why": "its time is up"}], tmp_path / "page.md")
    assert "| 1b-l4, classify | 1 | 6.0 % | 8.0 % | -1.7 % |" in (tmp_path / "page.md").read_text()
