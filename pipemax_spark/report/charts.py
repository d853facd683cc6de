"""Draw the charts of a run: rates of each engine, phases over KV use, and step times.

Each function draws into matplotlib's axes that it is given. It knows nothing of files and pages. Legends stand outside
of the axes, so that they hide nothing, and time is in seconds, minutes or hours, by the run's length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan
from typing import TYPE_CHECKING, Any, Self

from pipemax_spark.report.engine_tracks import EngineTrack

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RATE_WINDOW_S = 10.0
_RATE_WINDOW_SHARE = 1 / 400
"""Time window of a rate, in seconds and as a share of the run: in a shorter one, bursts of completions make spikes."""
PHASE_COLORS = {
    "starting": "#d9d9d9",
    "loading": "#bdbdbd",
    "prefill": "#e6842a",
    "decode": "#137b80",
    "mixed": "#8e6c8a",
    "idle": "#f4f4f4",
    "failed": "#b22222",
}
_OTHER_COLOR = "#888888"
MOST_NAMED = 12
"""Maximum number of engines that a legend names."""


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
    def label(self) -> str:
        return f"{self.name} since the first chunk was started"

    @property
    def rate_window_s(self) -> float:
        return max(_RATE_WINDOW_S, self.length_s * _RATE_WINDOW_SHARE)

    def of_seconds(self, seconds: Sequence[float]) -> list[float]:
        return [each / self.seconds for each in seconds]


def draw_rates(
    axes: "Axes", by_server: Mapping[str, EngineTrack], time: TimeAxis, *, of_tokens: bool
) -> None:
    """Draw each engine's rate, and the rate of all together if there are several."""
    import matplotlib as mpl

    colors = mpl.colormaps["tab20"]
    window_s = time.rate_window_s
    rate: Callable[[EngineTrack], list[float]] = (
        (lambda track: track.tokens_per_s(over_s=window_s))
        if of_tokens
        else (lambda track: track.rows_per_s(over_s=window_s))
    )
    for i, (name, track) in enumerate(by_server.items()):
        label = f"engine {i + 1}: {name}"
        axes.plot(
            time.of_seconds(track.reported_s), rate(track), color=colors(i % 20), linewidth=1.2, label=label
        )
    axes.set_ylabel("generated tokens/s" if of_tokens else "rows/s")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, time.length_s / time.seconds)
    if 0 < len(by_server) <= MOST_NAMED:
        _legend_below(axes, columns=2)


def draw_kv_use(axes: "Axes", track: EngineTrack, name: str, time: TimeAxis) -> None:
    """Draw the share of each KV pool that is in use, over a ribbon of the phases."""
    for start_s, length_s, phase in _spans(track):
        color = PHASE_COLORS.get(phase, _OTHER_COLOR)
        axes.axvspan(
            start_s / time.seconds, (start_s + length_s) / time.seconds, color=color, alpha=0.35, linewidth=0
        )
    at = time.of_seconds(track.reported_s)
    axes.plot(at, track.kv_usage, color="black", linewidth=1, label="GPU KV")
    if not all(isnan(used) for used in track.host_kv_usage):
        used = [0.0 if isnan(share) else share for share in track.host_kv_usage]
        axes.plot(at, used, color="black", linewidth=1, linestyle="--", label="host KV, reserved")
    axes.set_xlim(0, time.length_s / time.seconds)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel(f"{name}\nKV use")


def add_phase_legend(axes: "Axes", tracks: Sequence[EngineTrack]) -> None:
    """Name the lines and the phases' colours below the axes."""
    import matplotlib as mpl

    shown = {phase for track in tracks for phase in track.phases}
    patches: list[Any] = [
        mpl.patches.Patch(color=PHASE_COLORS.get(phase, _OTHER_COLOR), alpha=0.35, label=phase)
        for phase in [*(p for p in PHASE_COLORS if p in shown), *sorted(shown - PHASE_COLORS.keys())]
    ]
    lines, _ = axes.get_legend_handles_labels()
    if handles := [*lines, *patches]:
        _legend_below(axes, columns=min(8, len(handles)), handles=handles, offset=-0.4)


def draw_step_times(axes: "Axes", tracks: Sequence[EngineTrack], time: TimeAxis) -> None:
    """Draw predicted against measured step times on logarithmic axes; without predictions, measured ones over time."""
    import matplotlib as mpl

    steps = [
        step
        for track in tracks
        for step in zip(
            track.reported_s, track.measured_step_s, track.predicted_step_s, track.phases, strict=True
        )
        if step[1] > 0  # neither NaN nor zero
    ]
    predicted = [step for step in steps if step[2] > 0]
    if predicted:
        colors = [PHASE_COLORS.get(phase, _OTHER_COLOR) for _, _, _, phase in predicted]
        axes.scatter(
            [step[1] * 1e3 for step in predicted],
            [step[2] * 1e3 for step in predicted],
            c=colors,
            s=8,
            rasterized=True,  # a drawing of thousands of points would be larger than a picture of them
        )
        ends = [
            min(min(step[1:3]) for step in predicted) * 1e3,
            max(max(step[1:3]) for step in predicted) * 1e3,
        ]
        axes.plot(ends, ends, color="grey", linewidth=0.8, label="prediction = measurement")
        for scale, axis in ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis)):
            scale("log")
            for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
                set_formatter(
                    mpl.ticker.LogFormatter()
                )  # plain numbers, and few of them over several decades
        axes.set_xlabel("measured step of the slowest stage, ms")
        axes.set_ylabel("predicted, ms")
        _legend_below(axes, columns=1, offset=-0.18)
    else:
        at = time.of_seconds([step[0] for step in steps])
        axes.plot(at, [step[1] * 1e3 for step in steps], ".", markersize=3, rasterized=True)
        axes.set_xlabel(time.label)
        axes.set_ylabel("step, ms")


def _legend_below(axes: "Axes", *, columns: int, handles: Any = None, offset: float = -0.22) -> None:
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, offset),
        ncols=columns,
        fontsize="small",
        frameon=False,
    )


def _spans(track: EngineTrack) -> list[tuple[float, float, str]]:
    """Return (start, length, phase) of each stretch of one phase, in seconds."""
    spans: list[tuple[float, float, str]] = []
    for (start_s, end_s), phase in zip(pairwise(track.reported_s), track.phases, strict=False):
        first_s = spans.pop()[0] if spans and spans[-1][2] == phase else start_s
        spans.append((first_s, end_s - first_s, phase))
    return spans
