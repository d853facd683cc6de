"""Plot a run: each engine's rows per second, its phases over its KV use, and its step times."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pipemax_spark.monitor.progress import EngineSample, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPAN_S = 10.0
"""A rate is over this much of the past: with less, completions that come in bursts make spikes."""
_PHASE_COLORS = {
    "starting": "#d9d9d9",
    "loading": "#bdbdbd",
    "prefill": "#e6842a",
    "decode": "#137b80",
    "mixed": "#8e6c8a",
    "idle": "#f4f4f4",
    "failed": "#b22222",
}
_OTHER_COLOR = "#888888"
_MOST_NAMED = 12
_MOST_SHOWN = 4
"""Maximum number of engines whose KV use gets a strip of its own."""


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Write the plot as PNG. Raise ``ImportError`` without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for sample in samples for name in sample.engines))
    tracks = [_reports(samples, name) for name in names]
    strips = max(1, min(_MOST_SHOWN, len(names)))
    figure = Figure(figsize=(10, 6.5 + 1.6 * strips), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(strips + 2, 1, height_ratios=[3, *[1.6] * strips, 3.4])
    rows = figure.add_subplot(grid[0])
    _plot_rows(rows, names, tracks)
    for i in range(strips):
        strip = figure.add_subplot(grid[i + 1], sharex=rows)
        if i < len(tracks):
            _plot_kv_use(strip, tracks[i], f"engine {i + 1}")
    strip.set_xlabel("seconds since the first chunk was started")
    _plot_phase_legend(strip, tracks)
    _plot_step_times(figure.add_subplot(grid[strips + 1]), tracks)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _plot_rows(axes: "Axes", names: Sequence[str], tracks: Sequence[Sequence[EngineSample]]) -> None:
    import matplotlib as mpl

    colors = mpl.colormaps["tab20"]
    for i, (name, track) in enumerate(zip(names, tracks, strict=True)):
        seconds = [report.reported_s for report in track]
        rates = _rates(seconds, [report.rows_done for report in track])
        axes.plot(seconds, rates, color=colors(i % 20), linewidth=1.2, label=f"engine {i + 1}: {name}")
    axes.set_ylabel("rows/s")
    axes.set_title(f"Each engine's throughput, mean of {_SPAN_S:.0f} s")
    if 0 < len(names) <= _MOST_NAMED:
        axes.legend(loc="lower right", fontsize="x-small")


def _plot_kv_use(axes: "Axes", track: Sequence[EngineSample], name: str) -> None:
    """Plot the share of each KV pool that is in use, over a ribbon of the phases."""
    for start_s, length_s, phase in _spans(track):
        color = _PHASE_COLORS.get(phase, _OTHER_COLOR)
        axes.axvspan(start_s, start_s + length_s, color=color, alpha=0.35, linewidth=0)
    seconds = [report.reported_s for report in track]
    axes.plot(seconds, [report.kv_usage for report in track], color="black", linewidth=1, label="GPU KV")
    if any("host_kv_usage" in report.metrics for report in track):
        used = [report.metrics.get("host_kv_usage", 0.0) for report in track]
        axes.plot(seconds, used, color="black", linewidth=1, linestyle="--", label="host KV, reserved")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel(f"{name}\nKV use")
    axes.legend(loc="upper left", fontsize="x-small")


def _plot_phase_legend(axes: "Axes", tracks: Sequence[Sequence[EngineSample]]) -> None:
    import matplotlib as mpl

    shown = {report.phase for track in tracks for report in track}
    handles = [
        mpl.patches.Patch(color=_PHASE_COLORS.get(phase, _OTHER_COLOR), alpha=0.35, label=phase)
        for phase in [*(p for p in _PHASE_COLORS if p in shown), *sorted(shown - _PHASE_COLORS.keys())]
    ]
    if handles:
        legend = axes.get_legend()
        axes.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize="x-small")
        if legend is not None:
            axes.add_artist(legend)


def _plot_step_times(axes: "Axes", tracks: Sequence[Sequence[EngineSample]]) -> None:
    """Plot predicted against measured step times if the engine predicts them, else measured ones over time."""
    reports = [report for track in tracks for report in track if report.metrics.get("measured_step_s")]
    measured_ms = [report.metrics["measured_step_s"] * 1e3 for report in reports]
    if any(report.metrics.get("predicted_step_s") for report in reports):
        predicted_ms = [report.metrics.get("predicted_step_s", 0.0) * 1e3 for report in reports]
        colors = [_PHASE_COLORS.get(report.phase, _OTHER_COLOR) for report in reports]
        axes.scatter(measured_ms, predicted_ms, c=colors, s=10)
        longest_ms = max(*measured_ms, *predicted_ms)
        axes.plot([0, longest_ms], [0, longest_ms], color="grey", linewidth=0.8)
        axes.set_xlabel("measured step of the slowest stage, ms")
        axes.set_ylabel("predicted, ms")
    else:
        axes.plot([report.reported_s for report in reports], measured_ms, ".", markersize=3)
        axes.set_xlabel("seconds since the first chunk was started")
        axes.set_ylabel("step, ms")
    axes.set_title("Step times, one for each report")


def _reports(samples: Sequence[Sample], name: str) -> list[EngineSample]:
    """Return one engine's reports, each once: samples are taken more often than servers report."""
    found = {
        sample.engines[name].reported_s: sample.engines[name] for sample in samples if name in sample.engines
    }
    return [found[at_s] for at_s in sorted(found)]


def _rates(seconds: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return rates per second, each over the last ``_SPAN_S`` seconds before its instant."""
    rates, first = [], 0
    for at_s, count in zip(seconds, counts, strict=True):
        while seconds[first] < at_s - _SPAN_S:
            first += 1
        span_s = at_s - seconds[first]
        rates.append((count - counts[first]) / span_s if span_s > 0 else 0.0)
    return rates


def _spans(track: Sequence[EngineSample]) -> list[tuple[float, float, str]]:
    """Return (start, length, phase) of each stretch of one phase, in seconds."""
    spans: list[tuple[float, float, str]] = []
    for report, following in pairwise(track):
        start_s = report.reported_s
        if spans and spans[-1][2] == report.phase:
            start_s = spans.pop()[0]
        spans.append((start_s, following.reported_s - start_s, report.phase))
    return spans
