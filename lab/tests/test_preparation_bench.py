"""The bench of the preparation refuses figures that cannot be."""

from typing import Any

import pytest

from lab.bench.preparation import checked


def found(
    *, rows: int = 250, wall_s: float = 10.0, shuffled: int = 250, seconds: float = 4.0
) -> dict[str, Any]:
    names = ("check ids", "write slices")
    stages = [
        {"stage": name, "began_s": 100.0, "ended_s": 100.0 + seconds, "rows_shuffled": shuffled}
        for name in names
    ]
    return {"rows": rows, "began_s": 100.0, "ended_s": 100.0 + wall_s, "stages": stages}


def test_figures_that_can_be_are_told_in_seconds() -> None:
    told = checked("prepare", found(), 250)
    assert told["seconds"] == 10.0
    assert [(stage["stage"], stage["seconds"]) for stage in told["stages"]] == [
        ("check ids", 4.0),
        ("write slices", 4.0),
    ]


@pytest.mark.parametrize(
    ("step", "figures", "complaint"),
    [
        ("prepare", {"rows": 249}, "came to 249 rows, and there are 250"),
        ("fill", {}, "came to 250 rows, and there are 244"),
        ("rerun", {}, "came to 250 rows, and there are 6"),
        ("prepare", {"seconds": 6.0}, "took 12.0 s, and all of it 10.0 s"),
        ("prepare", {"shuffled": 249}, "shuffled 249 of 250 rows into slices"),
    ],
)
def test_other_figures_are_refused(step: str, figures: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        checked(step, found(**figures), 250)
