"""Plot a run: each engine's rows per second, its phases over its KV use, and its step times.

``python -m pipemax_spark.monitor.plot PATH`` reads the engines' tracks from standard input, an Arrow stream of each.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from pipemax_spark.monitor.engine_tracks import EngineTrack

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPAN_S = 10.0
"""Time window of a rate: in a shorter one, completions that come in bursts make spikes."""
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
"""Maximum number of engines whose KV use gets its own strip."""


def plot(by_server: Mapping[str, EngineTrack], path: Path) -> None:
    """Write the plot of the servers' tracks as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names, tracks = list(by_server), list(by_server.values())
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


def _plot_rows(axes: "Axes", names: Sequence[str], tracks: Sequence[EngineTrack]) -> None:
    import matplotlib as mpl

    colors = mpl.colormaps["tab20"]
    for i, (name, track) in enumerate(zip(names, tracks, strict=True)):
        rates = track.rows_per_s(over_s=_SPAN_S)
        axes.plot(
            track.reported_s, rates, color=colors(i % 20), linewidth=1.2, label=f"engine {i + 1}: {name}"
        )
    axes.set_ylabel("rows/s")
    axes.set_title(f"Each engine's throughput, mean of {_SPAN_S:.0f} s")
    if 0 < len(names) <= _MOST_NAMED:
        axes.legend(loc="lower right", fontsize="x-small")


def _plot_kv_use(axes: "Axes", track: EngineTrack, name: str) -> None:
    """Plot the share of each KV pool that is in use, over a ribbon of the phases."""
    for start_s, length_s, phase in _spans(track):
        color = _PHASE_COLORS.get(phase, _OTHER_COLOR)
        axes.axvspan(start_s, start_s + length_s, color=color, alpha=0.35, linewidth=0)
    axes.plot(track.reported_s, track.kv_usage, color="black", linewidth=1, label="GPU KV")
    if not all(isnan(used) for used in track.host_kv_usage):
        used = [0.0 if isnan(share) else share for share in track.host_kv_usage]
        axes.plot(
            track.reported_s, used, color="black", linewidth=1, linestyle="--", label="host KV, reserved"
        )
    axes.set_ylim(0, 1.05)
    axes.set_ylabel(f"{name}\nKV use")
    axes.legend(loc="upper left", fontsize="x-small")


def _plot_phase_legend(axes: "Axes", tracks: Sequence[EngineTrack]) -> None:
    import matplotlib as mpl

    shown = {phase for track in tracks for phase in track.phases}
    handles = [
        mpl.patches.Patch(color=_PHASE_COLORS.get(phase, _OTHER_COLOR), alpha=0.35, label=phase)
        for phase in [*(p for p in _PHASE_COLORS if p in shown), *sorted(shown - _PHASE_COLORS.keys())]
    ]
    if handles:
        legend = axes.get_legend()
        axes.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize="x-small")
        if legend is not None:
            axes.add_artist(legend)


def _plot_step_times(axes: "Axes", tracks: Sequence[EngineTrack]) -> None:
    """Plot predicted against measured step times if the engine predicts them, else measured ones over time."""
    steps = [
        step
        for track in tracks
        for step in zip(
            track.reported_s, track.measured_step_s, track.predicted_step_s, track.phases, strict=True
        )
        if step[1] > 0  # neither NaN nor zero
    ]
    measured_ms = [measured_s * 1e3 for _, measured_s, _, _ in steps]
    if any(predicted_s > 0 for _, _, predicted_s, _ in steps):
        predicted_ms = [0.0 if isnan(predicted_s) else predicted_s * 1e3 for _, _, predicted_s, _ in steps]
        colors = [_PHASE_COLORS.get(phase, _OTHER_COLOR) for _, _, _, phase in steps]
        axes.scatter(measured_ms, predicted_ms, c=colors, s=10)
        longest_ms = max(*measured_ms, *predicted_ms)
        axes.plot([0, longest_ms], [0, longest_ms], color="grey", linewidth=0.8)
        axes.set_xlabel("measured step of the slowest stage, ms")
        axes.set_ylabel("predicted, ms")
    else:
        axes.plot([reported_s for reported_s, _, _, _ in steps], measured_ms, ".", markersize=3)
        axes.set_xlabel("seconds since the first chunk was started")
        axes.set_ylabel("step, ms")
    axes.set_title("Step times, one for each report")


def _spans(track: EngineTrack) -> list[tuple[float, float, str]]:
    """Return (start, length, phase) of each stretch of one phase, in seconds."""
    spans: list[tuple[float, float, str]] = []
    for (start_s, end_s), phase in zip(pairwise(track.reported_s), track.phases, strict=False):
        first_s = spans.pop()[0] if spans and spans[-1][2] == phase else start_s
        spans.append((first_s, end_s - first_s, phase))
    return spans


def _main() -> None:
    source = pa.BufferReader(sys.stdin.buffer.read())
    tracks = {}
    while source.tell() < source.size():
        server_id, track = EngineTrack.from_arrow(pa.ipc.open_stream(source).read_all())
        tracks[server_id] = track
    plot(tracks, Path(sys.argv[1]))


if __name__ == "__main__":
    _main()
