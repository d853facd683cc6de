"""``pipemax calibrate``: measure an engine's step times and copies, and report how well they are predicted."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipemax.cli.common import measured_config, one_line_errors
from pipemax.cli.ending import ends_on_sigterm

if TYPE_CHECKING:
    from pipemax.vllm_ext.calibration.judged_run import CalibrationReport

_PAPER_WORST = "8 %"


def calibrate(
    out: Annotated[
        Path,
        typer.Option(help="Calibration file to write, for the `calibration:` field of an engine config."),
    ],
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: the one in --engine.")
    ] = None,
    engine: Annotated[Path | None, typer.Option(help="Engine config, a YAML file.")] = None,
    seconds: Annotated[
        float,
        typer.Option(min=1.0, help="Maximum seconds of measuring; loading does not count."),
    ] = 300.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Plot of predicted against measured step times; default: the path of --out with the suffix .png."
        ),
    ] = None,
) -> None:
    """Measure α, β, δ of each stage, and the bandwidth of prefetches, on this machine.

    Starts the engine under policy pipemax and runs decode batches of many sizes at short, medium and long contexts.
    Then runs requests of mixed lengths that were not used for the fit, and compares their step times with the
    prediction.

    Example: pipemax calibrate --model /models/llama --engine engine.yaml --out llama.yaml
    """
    from pipemax.control.times.calibration import save_calibration
    from pipemax.policy.layout_start import settled_config
    from pipemax.replicas.one_replica import as_first_replica

    with one_line_errors(), ends_on_sigterm():
        config = as_first_replica(settled_config(measured_config(model, engine)))
        if not out.parent.is_dir():
            raise ValueError(f"--out {out}: there is no directory {out.parent}")
        # vLLM takes ten seconds to import, so errors in the arguments are reported first.
        from pipemax.vllm_ext.calibration.judged_run import run_calibration

        report = run_calibration(config, time_limit_s=seconds, on_wave=_show_wave)
        save_calibration(out, report.calibration)
        _print(report)
        typer.echo(f"calibration        {out}")
        _plot(report, plot or out.with_suffix(".png"))


def _show_wave(done: int, designed: int, seconds: float) -> None:
    typer.echo(f"measured {done} of {designed} sets of requests, {seconds:.0f} s", err=True)


def _print(report: "CalibrationReport") -> None:
    calibration = report.calibration
    typer.echo(f"device             {calibration.device}")
    typer.echo(f"model              {calibration.model}, {len(calibration.stages)} stages")
    for number, stage in enumerate(calibration.stages):
        lines = ", ".join(
            f"{1e3 * line.alpha_s:.3f} ms·b + {1e3 * line.delta_s:.2f} ms from b = {line.min_size}"
            for line in stage.decode_time.segments
        )
        typer.echo(
            f"decode, stage {number}    {lines}; {1e9 * stage.decode_time.beta_s:.2f} ns per token of KV"
        )
        typer.echo(f"copies, stage {number}    {stage.h2d_bytes_per_s / 1e9:.2f} GB/s")
    typer.echo(f"round trip         {1e3 * calibration.round_trip_s:.2f} ms between two steps of a batch")
    for name, error in report.errors.items():
        typer.echo(
            f"{name:<19}{error.num_steps} step times: {error.within_5_percent:.0%} within 5 %, off by "
            f"{error.mean:.1%} on average, {error.worst:.0%} at worst (the paper's worst: {_PAPER_WORST})"
        )


def _plot(report: "CalibrationReport", path: Path) -> None:
    try:
        from pipemax.cli.prediction_plot import plot_predictions
    except ImportError as error:
        typer.echo(f"no plot was drawn, because matplotlib is not installed ({error})", err=True)
        return
    plot_predictions(report.pairs, path, title=f"{report.calibration.model} on {report.calibration.device}")
    typer.echo(f"plot               {path}")
