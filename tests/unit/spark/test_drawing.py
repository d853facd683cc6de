"""Panels of lines, bands and dots as SVG."""

import random
import re
from math import nan, sin
from xml.etree import ElementTree

import pytest

from pipemax_spark.report.drawing import WIDTH, Axis, Key, Panel, drawing, round_up

X, Y = Axis(low=0.0, high=10.0, label="hours"), Axis(low=0.0, high=1.0, label="share")


def numbers_of(svg: str, tag: str) -> list[float]:
    (shape,) = ElementTree.fromstring(svg).findall(f".//{{*}}{tag}")
    return [float(number) for number in re.findall(r"[-\d.]+", shape.get("points", "") or shape.get("d", ""))]


def test_points_lie_where_the_axes_say() -> None:
    panel = Panel(X, Y, height=100)
    panel.line([0.0, 10.0], [0.0, 1.0], "red")
    left, bottom, right, top = numbers_of(drawing([panel]), "polyline")
    assert 0 < left < right < WIDTH
    assert bottom - top == pytest.approx(100)
    middle = Panel(Axis(low=1.0, high=100.0, is_log=True), Y, height=100)
    middle.line([10.0, 100.0], [0.5, 0.5], "red")
    assert numbers_of(drawing([middle]), "polyline")[0] == pytest.approx((left + right) / 2, abs=0.1)


def test_a_line_of_many_points_keeps_its_peaks_and_is_short() -> None:
    xs = [10.0 * number / 100_000 for number in range(100_001)]
    ys = [0.5 + 0.1 * sin(x) for x in xs]
    ys[70_001], ys[30_001] = 1.0, nan
    panel = Panel(X, Y, height=100)
    panel.line(xs, ys, "red")
    svg = drawing([panel])
    assert len(svg) < 80_000
    assert min(numbers_of(svg, "polyline")[1::2]) == pytest.approx(26.0), "the one point at the top"
    assert "nan" not in svg


def test_dots_at_one_place_are_drawn_once_for_each_colour() -> None:
    rng = random.Random(0)
    panel = Panel(X, Y, height=100)
    panel.dots((5 + rng.random() / 100, 0.5, rng.choice(["red", "blue"])) for _ in range(50_000))
    svg = drawing([panel])
    assert len(svg) < 5_000
    assert svg.count("stroke-linecap") == 2


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(low=0.0, high=10.0), [0, 2, 4, 6, 8, 10]),
        (Axis(low=0.0, high=0.6), [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        (Axis(low=0.0, high=1.05), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (Axis(low=7.0, high=2_500.0, is_log=True), [10, 100, 1000]),
        (Axis(low=9.0, high=99.0, is_log=True), [10, 20, 50]),
    ],
)
def test_ticks_are_few_round_numbers(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)


def test_any_range_has_ticks_within_it() -> None:
    rng = random.Random(1)
    for _ in range(2_000):
        low = 10 ** rng.uniform(-12, 12)
        for axis in (
            Axis(low=0.0, high=low),
            Axis(low=low, high=low * 10 ** rng.uniform(0.1, 9), is_log=True),
        ):
            assert len(axis.ticks()) <= 12
            assert all(-1e-9 <= axis.share(tick) <= 1 + 1e-9 for tick in axis.ticks() if tick > 0)
        assert low * 0.999 <= round_up(low) <= 2 * low
    assert round_up(0.0) == round_up(nan) == 1.0


def test_names_are_escaped_and_a_legend_has_as_many_rows_as_it_needs() -> None:
    panel = Panel(X, Y, height=100, title="<b>")
    bare = panel.height
    panel.explain(Key(f"engine {number}: a <host> & 'port' of a long name", "red") for number in range(9))
    root = ElementTree.fromstring(drawing([panel]))
    assert "engine 8: a <host> & 'port' of a long name" in {text.text for text in root.iter() if text.text}
    assert panel.height > bare + 40


def test_a_range_without_extent_is_refused() -> None:
    with pytest.raises(ValueError, match="from a number to a larger one"):
        Axis(low=1.0, high=1.0)
    with pytest.raises(ValueError, match="from above 0"):
        Axis(low=0.0, high=1.0, is_log=True)
