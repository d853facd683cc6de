"""Draws figures like the paper's.

They are ``fig:overall``, ``fig:static``, ``fig:runtime`` (a) and ``fig:time_and_memory``. Each function draws one file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from lab.paper.study import Study
from pipemax.sim.result import DecodeSample, SimulationResult

_DPI = 150
_SMOOTHING_STEPS = 8
_FIRST_ITERATIONS = 400


def write_plots(study: Study, directory: Path) -> list[Path]:
    """Draw every figure for which the study has the systems; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    by_name = {result.system: result for result in study.results}
    paths = [plot_overall([study], directory / "overall.png")]
    static = [name for name in by_name if name.startswith("static_")]
    pipemax = by_name.get("pipemax")
    if pipemax is not None:
        paths.append(plot_runtime(pipemax, directory / "time_and_memory.png"))
        if static:
            bars = [by_name[name] for name in static] + [pipemax]
            paths.append(plot_normalized(bars, pipemax, "Static prefetch", directory / "static.png"))
        if "layer_first" in by_name:
            bars = [by_name["layer_first"], pipemax]
            paths.append(plot_normalized(bars, pipemax, "KV cache layout", directory / "layout.png"))
    return paths


def plot_overall(studies: Sequence[Study], path: Path) -> Path:
    """Draw the throughput of each system over vLLM (TP), a group of bars for each study, as in ``fig:overall``."""
    groups = {
        f"{study.model}\n{study.node}\n{study.workload}": {
            result.system: study.ratio(result) for result in study.results
        }
        for study in studies
    }
    return plot_ratios(groups, path)


def plot_ratios(groups: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """Draw group → system → throughput over vLLM (TP) as bars."""
    names = list(dict.fromkeys(name for ratios in groups.values() for name in ratios))
    figure = Figure(figsize=(max(7.0, 1.3 * len(groups)), 3.6))
    axes = figure.subplots()
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = np.arange(len(groups)) + (index - (len(names) - 1) / 2) * width
        axes.bar(places, [ratios.get(name, 0.0) for ratios in groups.values()], width, label=name)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.6)
    axes.set_ylabel("throughput, vLLM (TP) = 1")
    axes.legend(fontsize=7, ncol=4)
    return _save(figure, path)


def plot_normalized(
    results: Sequence[SimulationResult], reference: SimulationResult, title: str, path: Path
) -> Path:
    """Draw each result's throughput over that of ``reference``: ``fig:static`` and ``fig:runtime`` (a)."""
    figure = Figure(figsize=(1.5 + 0.9 * len(results), 3.2))
    axes = figure.subplots()
    ratios = [result.total_tokens_per_s / reference.total_tokens_per_s for result in results]
    bars = axes.bar([result.system for result in results], ratios)
    axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.margins(y=0.1)
    axes.tick_params(axis="x", labelrotation=30, labelsize=8)
    axes.set_ylabel(f"throughput, {reference.system} = 1")
    axes.set_title(title, fontsize=10)
    return _save(figure, path)


def plot_runtime(result: SimulationResult, path: Path) -> Path:
    """Draw ``plot_decode`` of a simulated run. Raise ``ValueError`` if it has no decode steps."""
    samples = result.recording.decode_samples
    if not samples:
        raise ValueError(f"the run of {result.system} has no decode steps")
    return plot_decode(samples, result.gpu_kv_tokens, path)


def plot_decode(samples: Sequence[DecodeSample], gpu_kv_tokens: int, path: Path) -> Path:
    """Draw decode step time and KV per batch, simulated or measured: ``fig:time_and_memory`` (a), (b).

    On the left over the run, smoothed; on the right the first iterations, one by one, where a warm-up would be.
    """
    step_ms = np.array([sample.step_s * 1e3 for sample in samples])
    kv = np.array([sample.kv_tokens for sample in samples]) / gpu_kv_tokens
    # What was copied while one step ran belongs to the batch of the next.
    prefetched = np.array([0, *(sample.prefetched_tokens for sample in samples[:-1])]) / gpu_kv_tokens
    figure = Figure(figsize=(10.0, 5.2))
    panels = figure.subplots(2, 2, sharex="col", sharey="row", width_ratios=[2, 1])
    first = slice(0, _FIRST_ITERATIONS)
    for (above, below), lines in (
        (panels[:, 0], [_smoothed(line) for line in (step_ms, kv, prefetched)]),
        (panels[:, 1], [line[first] for line in (step_ms, kv, prefetched)]),
    ):
        iterations = np.arange(len(lines[0]))
        above.plot(iterations, lines[0], linewidth=0.8)
        resident = np.maximum(0.0, lines[1] - lines[2])
        below.stackplot(
            iterations, resident, np.minimum(lines[1], lines[2]), labels=["resident", "prefetched"]
        )
        below.set_xlabel("decode iteration")
    panels[0, 0].set_ylabel("(a) decode step, ms")
    panels[0, 1].set_title("the first iterations", fontsize=9)
    panels[1, 0].set_ylabel("(b) KV of the batch, GPU memory = 1")
    panels[1, 0].legend(fontsize=8, loc="upper right")
    return _save(figure, path)


def _smoothed(line: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if len(line) <= _SMOOTHING_STEPS:
        return line
    window = np.full(_SMOOTHING_STEPS, 1 / _SMOOTHING_STEPS)
    return np.convolve(line, window, mode="valid")


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    return path
