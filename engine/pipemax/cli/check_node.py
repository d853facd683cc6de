"""``pipemax check-node``: check on this machine that an engine under PipeMax gives right results, and report."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipemax.cli.common import JsonFile, one_line_errors, write_json
from pipemax.cli.ending import ends_on_sigterm

if TYPE_CHECKING:
    from pipemax.config import EngineConfig
    from pipemax.vllm_ext.launch.known_check import NodeCheck
    from pipemax.vllm_ext.node_check.node import CheckedNode

_STATUS = {"passed": 0, "failed": 1, "inconclusive": 3}


def check_node(
    engine: Annotated[Path | None, typer.Option(help="Engine config, a YAML file.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: the one in --engine.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Maximum seconds of measuring for the calibration.")
    ] = 15.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Calibration file to write, for the `calibration:` field of an engine config."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Check PipeMax on this machine: tokens, copies, prefetches over poison; then calibrate the engine.

    Compares tokens with stock vLLM's on a few random layers of the model's shapes, under batch-invariant kernels. Then
    starts the engine under policy pipemax, sends known bytes through every kind of copy and compares them, and
    repeats the same steps with poison in place of what is about to be prefetched. An engine makes the last two checks
    by itself at its first start on a machine. Then measures α, β, δ of each stage and the bandwidth of prefetches by
    decode batches of many sizes at short, medium and long contexts, and compares the step times of other requests with
    the prediction. Check and calibration are kept for later starts. Exits with 1 if PipeMax must not run here, with 3
    if the check is inconclusive.

    Example: pipemax check-node --engine engine.yaml
    """
    from dataclasses import asdict

    from pipemax.control.times.calibration import save_calibration
    from pipemax.policy.layout_start import settled_config

    with one_line_errors(), ends_on_sigterm():
        if out is not None and not out.parent.is_dir():
            raise ValueError(f"--out {out}: there is no directory {out.parent}")
        config = as_first_replica(settled_config(_measured_config(model, engine)))
        # vLLM takes ten seconds to import, so errors in the arguments are reported first.
        from pipemax.vllm_ext.node_check.node import check_this_node

        checked = check_this_node(config, typer.echo, calibrate_s=seconds)
        _print(checked.check)
        typer.echo(f"kept         {checked.path or 'nowhere: see the log'}")
        _print_calibration(checked)
        if out is not None and checked.calibration is not None:
            save_calibration(out, checked.calibration)
            typer.echo(f"calibration  {out}")
        if json_file is not None:
            write_json(json_file, asdict(checked.check) | {"verdict": checked.check.verdict})
    if status := _STATUS[checked.check.verdict]:
        raise typer.Exit(status)


def _measured_config(model: str | None, engine: Path | None) -> "EngineConfig":
    """Return the config of the file, with this model if one is given, without a calibration.

    Its policy is pipemax, the only policy that times its steps.
    """
    from pipemax.config import EngineConfig

    if engine is None and model is None:
        raise ValueError("give --model, or --engine with a file that names one")
    changes: dict[str, Any] = {} if model is None else {"model": model}
    changes |= {
        "policy": "pipemax",
        "calibration": None,
        "calibrate_at_start_s": 0.0,
        "check_at_start": False,
    }
    return EngineConfig.parse(changes) if engine is None else EngineConfig.load(engine, **changes)


def as_first_replica(config: "EngineConfig") -> "EngineConfig":
    """Take the place of the first replica: return its config, and leave this process its GPUs and cores only.

    All replicas are equal, so what is measured of the first holds for all. Call this before vLLM is imported. Nothing
    changes for a config without replicas. ``ValueError`` if there are fewer GPUs than all replicas need.
    """
    from pipemax.replicas.division import divide
    from pipemax.replicas.hardware import read_hardware

    if config.num_replicas == 1:
        return config
    share = divide(config, read_hardware())[0]
    os.sched_setaffinity(0, share.cores)
    if share.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    return share.config


def _print(check: "NodeCheck") -> None:
    typer.echo(f"device       {check.device}")
    typer.echo(f"model        {check.model}, {check.checked}")
    for part in check.parts:
        typer.echo(f"{_mark(part.verdict):<13}{part.name}: {part.detail}")
    for name, figure in check.figures.items():
        typer.echo(f"{'':<13}{name}: {figure:g}")
    meaning = {
        "passed": "PipeMax may run here",
        "failed": "PipeMax must not run here; set policy: vllm",
        "inconclusive": "nothing is known to be wrong, and not all could be shown to be right",
    }
    typer.echo(f"verdict      {check.verdict}: {meaning[check.verdict]} ({check.seconds:.0f} s)")


def _print_calibration(checked: "CheckedNode") -> None:
    calibration = checked.calibration
    if calibration is None:
        typer.echo("calibration  not measured")
        return
    typer.echo(f"calibration  {calibration.measured}")
    for number, stage in enumerate(calibration.stages):
        lines = ", ".join(
            f"{1e3 * line.alpha_s:.3f} ms·b + {1e3 * line.delta_s:.2f} ms from b = {line.min_size}"
            for line in stage.decode_time.segments
        )
        typer.echo(
            f"stage {number:<7}decode {lines}; {1e9 * stage.decode_time.beta_s:.2f} ns per token of KV; copies "
            f"{stage.h2d_bytes_per_s / 1e9:.2f} GB/s"
        )
    typer.echo(f"round trip   {1e3 * calibration.round_trip_s:.2f} ms between two steps of a batch")
    for name, error in checked.errors.items():
        typer.echo(
            f"{'':<13}{name}: {error.num_steps} step times, {error.within_5_percent:.0%} within 5 %, off by "
            f"{error.mean:.1%} on average, {error.worst:.0%} at worst"
        )


def _mark(verdict: str) -> str:
    return "FAILED" if verdict == "failed" else str(verdict)
