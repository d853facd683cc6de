"""Draw the charts of a run: rates of each engine, KV use over phases, and step times.

It knows nothing of files and pages. Time is in seconds, minutes or hours, by the run's length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan
from typing import Self

from pipemax_spark.report.drawing import Axis, Key, Panel, drawing, round_up
from pipemax_spark.report.engine_tracks import EngineTrack

_RATE_WINDOW_S = 10.0
_RATE_WINDOW_SHARE = 1 / 400
"""Time window of a rate, in seconds and as a share of the run: in a shorter one, bursts of completions make spikes."""
PHASE_COLORS = {
    "starting": "#d9d9d9",
    "loading": "#bdbdbd",
    "prefill": "#e6842a",
    "decode": "#137b80",
    "mixed": "#8e6c8a",
    "idle": "#7fb2e5",
    "failed": "#b22222",
}
_OTHER_COLOR = "#888888"
_ENGINE_COLORS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
_INK = "currentColor"
MOST_NAMED = 12
"""Maximum number of engines that a legend names."""
_FEWEST_POINTS = 3
_HISTOGRAM_WIDTH = 460
MOST_STRIPS = 4
"""Maximum number of engines whose KV use gets its own panel."""


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The unit of time that suits a run's length."""

    name: str
    seconds: float
    length_s: float

    @classmethod
    def of(cls, tracks: Sequence[EngineTrack]) -> Self:
        length_s = max((track.reported_s[-1] for track in tracks if len(track)), default=1.0)
        for name, seconds, least_s in (("hours", 3600.0, 3 * 3600.0), ("minutes", 60.0, 300.0)):
            if length_s >= least_s:
                return cls(name, seconds, length_s)
        return cls("seconds", 1.0, length_s)

    @property
    def rate_window_s(self) -> float:
        return max(_RATE_WINDOW_S, self.length_s * _RATE_WINDOW_SHARE)

    @property
    def axis(self) -> Axis:
        label = f"{self.name} since the first chunk was started"
        return Axis(low=0.0, high=max(self.length_s, 1.0) / self.seconds, label=label)

    def of_seconds(self, seconds: Sequence[float]) -> list[float]:
        """Return these in the axis' unit; what was before the first chunk is at 0."""
        return [max(0.0, value) / self.seconds for value in seconds]


def charts_of(by_server: Mapping[str, EngineTrack]) -> dict[str, str]:
    """Return the charts of the servers' tracks as SVG texts: ``rows``, ``tokens``, ``kv`` and ``steps``.

    A chart that would show next to nothing is left out, as all are of a run that took few seconds.
    """
    tracks = list(by_server.values())
    time = TimeAxis.of(tracks)
    charts = {}
    if any(_num_above_0(track.rows_per_s(over_s=time.rate_window_s)) for track in tracks):
        charts["rows"] = drawing([_rates(by_server, time, of_tokens=False)])
    if any(_num_above_0(track.tokens_per_s(over_s=time.rate_window_s)) for track in tracks):
        charts["tokens"] = drawing([_rates(by_server, time, of_tokens=True)])
    if any(_num_above_0(track.kv_usage) for track in tracks):
        charts["kv"] = drawing(_kv_use(tracks, time))
    if sum(_num_above_0(track.measured_step_s) for track in tracks) >= _FEWEST_POINTS:
        charts["steps"] = drawing([_step_times(tracks, time)])
    return charts


def picture_of(by_server: Mapping[str, EngineTrack]) -> str:
    """Return one SVG text of rows per second, KV use and step times."""
    tracks = list(by_server.values())
    time = TimeAxis.of(tracks)
    title = f"Each engine's throughput, mean of {time.rate_window_s:.0f} s"
    rates = _rates(by_server, time, of_tokens=False, title=title)
    return drawing([rates, *_kv_use(tracks, time), _step_times(tracks, time, title="Step times")])


def histogram(name: str, bins: Sequence[tuple[int, int, int]]) -> str:
    """Return an SVG text of bins, each (least value, least value of the next bin, rows)."""
    # A bin of one value is around its tick.
    shift = 0.5 if bins[0][1] - bins[0][0] == 1 else 0.0
    shifted = [(begin - shift, end - shift, float(rows)) for begin, end, rows in bins]
    x = Axis(low=shifted[0][0], high=shifted[-1][1], label=name, is_whole=True)
    most_rows = max(rows for _, _, rows in shifted)
    y = Axis(low=0.0, high=round_up(most_rows), label="rows", is_whole=True)
    panel = Panel(x, y, height=150, width=_HISTOGRAM_WIDTH)
    panel.bars(shifted, _ENGINE_COLORS[0])
    return drawing([panel])


def _num_above_0(values: Sequence[float]) -> int:
    """Return how many values are above 0, or 0 if they are too few for a line."""
    number = sum(value > 0 for value in values)
    return number if number >= _FEWEST_POINTS else 0


def _rates(
    by_server: Mapping[str, EngineTrack], time: TimeAxis, *, of_tokens: bool, title: str = ""
) -> Panel:
    """Draw each engine's rate."""
    window_s = time.rate_window_s
    rates = [
        track.tokens_per_s(over_s=window_s) if of_tokens else track.rows_per_s(over_s=window_s)
        for track in by_server.values()
    ]
    highest = round_up(max((max(rate, default=0.0) for rate in rates), default=0.0))
    y = Axis(low=0.0, high=highest, label="generated tokens/s" if of_tokens else "rows/s")
    panel = Panel(time.axis, y, height=240, title=title)
    keys = []
    for number, ((name, track), rate) in enumerate(zip(by_server.items(), rates, strict=True)):
        color = _ENGINE_COLORS[number % len(_ENGINE_COLORS)]
        panel.line(time.of_seconds(track.reported_s), [max(0.0, value) for value in rate], color)
        keys.append(Key(f"engine {number + 1}: {name}", color))
    if len(keys) <= MOST_NAMED:
        panel.explain(keys)
    return panel


def _kv_use(tracks: Sequence[EngineTrack], time: TimeAxis) -> list[Panel]:
    """Draw the share of each KV pool that is in use, over a ribbon of the phases, for the first engines."""
    panels = []
    for number, track in enumerate(tracks[:MOST_STRIPS] or [EngineTrack()]):
        panel = Panel(time.axis, Axis(low=0.0, high=1.05, label=f"engine {number + 1}, KV use"), height=110)
        for begin_s, end_s, phase in _spans(track):
            begin, end = time.of_seconds((begin_s, end_s))
            panel.band(begin, end, _color(phase))
        at = time.of_seconds(track.reported_s)
        panel.line(at, [min(1.05, used) for used in track.kv_usage], _INK)
        if not all(isnan(used) for used in track.host_kv_usage):
            used = [0.0 if isnan(share) else min(1.05, share) for share in track.host_kv_usage]
            panel.line(at, used, _INK, is_dashed=True)
        panels.append(panel)
    panels[-1].explain(
        [
            Key("GPU KV", _INK),
            Key("host KV, reserved", _INK, is_dashed=True),
            *_phase_keys({phase for track in tracks for phase in track.phases}, is_area=True),
        ]
    )
    return panels


def _step_times(tracks: Sequence[EngineTrack], time: TimeAxis, *, title: str = "") -> Panel:
    """Draw predicted against measured step times on logarithmic axes; without predictions, measured ones over time."""
    steps = [
        step
        for track in tracks
        for step in zip(
            track.reported_s, track.measured_step_s, track.predicted_step_s, track.phases, strict=True
        )
        if 0 < step[1] < inf  # nor NaN
    ]
    shown = {phase for _, _, _, phase in steps}
    predicted = [step for step in steps if 0 < step[2] < inf]
    if not predicted:
        highest = round_up(1e3 * max((step[1] for step in steps), default=0.0))
        panel = Panel(time.axis, Axis(low=0.0, high=highest, label="step, ms"), height=240, title=title)
        places = time.of_seconds([step[0] for step in steps])
        panel.dots((x, 1e3 * step[1], _color(step[3])) for x, step in zip(places, steps, strict=True))
        panel.explain(_phase_keys(shown))
        return panel
    both_ms = [1e3 * value for step in predicted for value in step[1:3]]
    low, high = min(both_ms) / 1.1, max(both_ms) * 1.1
    x = Axis(low=low, high=high, is_log=True, label="measured step of the slowest stage, ms")
    panel = Panel(x, Axis(low=low, high=high, is_log=True, label="predicted, ms"), height=300, title=title)
    panel.line([low, high], [low, high], "#888888")
    panel.dots((1e3 * step[1], 1e3 * step[2], _color(step[3])) for step in predicted)
    panel.explain([Key("prediction = measurement", "#888888"), *_phase_keys(shown)])
    return panel


def _color(phase: str) -> str:
    return PHASE_COLORS.get(phase, _OTHER_COLOR)


def _phase_keys(shown: set[str], *, is_area: bool = False) -> list[Key]:
    ordered = [*(phase for phase in PHASE_COLORS if phase in shown), *sorted(shown - PHASE_COLORS.keys())]
    return [Key(phase, _color(phase), is_area=is_area) for phase in ordered]


def _spans(track: EngineTrack) -> list[tuple[float, float, str]]:
    """Return (begin, end, phase) of each stretch of one phase, in seconds."""
    spans: list[tuple[float, float, str]] = []
    for (begin_s, end_s), phase in zip(pairwise(track.reported_s), track.phases, strict=False):
        first_s = spans.pop()[0] if spans and spans[-1][2] == phase else begin_s
        spans.append((first_s, end_s, phase))
    return spans
