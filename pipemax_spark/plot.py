"""The picture of a run: rows and tokens per second of each engine, and what each was doing."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pipemax_spark.progress import EngineSample, Sample

_SPAN_S = 10.0
"""A rate is over so much of the past: shorter, and completions that come in bursts make spikes."""
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


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Written as PNG. ``ImportError`` without matplotlib."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for sample in samples for name in sample.engines))
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    rows, tokens, phases = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 3, max(1, min(4, len(names)))]}
    )
    colors = mpl.colormaps["tab20"]
    for i, name in enumerate(names):
        track = _reports(samples, name)
        seconds = [report.reported_s for report in track]
        style = {"color": colors(i % 20), "linewidth": 1.2, "label": f"engine {i + 1}: {name}"}
        rows.plot(seconds, _rates(seconds, [report.rows_done for report in track]), **style)
        tokens.plot(seconds, _rates(seconds, [report.tokens for report in track]), **style)
        for start_s, length_s, phase in _spans(track):
            color = _PHASE_COLORS.get(phase, _OTHER_COLOR)
            phases.broken_barh([(start_s, length_s)], (i - 0.4, 0.8), color=color)
    rows.set_ylabel("rows/s")
    tokens.set_ylabel("generated tokens/s")
    rows.set_title(f"Each engine's throughput, mean of {_SPAN_S:.0f} s")
    if 0 < len(names) <= _MOST_NAMED:
        rows.legend(loc="lower right", fontsize="x-small")
    phases.set_yticks(range(len(names)), [f"engine {i + 1}" for i in range(len(names))])
    phases.set_xlabel("seconds since the first chunk was started")
    shown = {engine.phase for sample in samples for engine in sample.engines.values()}
    handles = [
        mpl.patches.Patch(color=_PHASE_COLORS.get(phase, _OTHER_COLOR), label=phase)
        for phase in [*(p for p in _PHASE_COLORS if p in shown), *sorted(shown - _PHASE_COLORS.keys())]
    ]
    if handles:
        phases.legend(handles=handles, loc="upper right", ncols=len(handles), fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _reports(samples: Sequence[Sample], name: str) -> list[EngineSample]:
    """One engine's, each once: samples are taken more often than servers report."""
    found = {
        sample.engines[name].reported_s: sample.engines[name] for sample in samples if name in sample.engines
    }
    return [found[at_s] for at_s in sorted(found)]


def _rates(seconds: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Per second, over the last seconds before each instant."""
    rates, first = [], 0
    for at_s, count in zip(seconds, counts, strict=True):
        while seconds[first] < at_s - _SPAN_S:
            first += 1
        span_s = at_s - seconds[first]
        rates.append((count - counts[first]) / span_s if span_s > 0 else 0.0)
    return rates


def _spans(track: Sequence[EngineSample]) -> list[tuple[float, float, str]]:
    """(start, length, phase) of stretches of one phase."""
    spans: list[tuple[float, float, str]] = []
    for report, following in pairwise(track):
        start_s = report.reported_s
        if spans and spans[-1][2] == report.phase:
            start_s = spans.pop()[0]
        spans.append((start_s, following.reported_s - start_s, report.phase))
    return spans
