"""Compare PipeMax with other systems on a simulated node, as the paper does: ``python -m lab.paper``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipemax.cli.common import (
    FILE_COLUMNS,
    NODE_HELP,
    NODE_PANEL,
    OUTPUT_PANEL,
    ROWS_PANEL,
    Changes,
    JsonFile,
    KvDtype,
    Model,
    Seed,
    changed_node,
    one_line_errors,
    write_json,
)
from pipemax.domain.specs import KvCacheDtype

if TYPE_CHECKING:
    from lab.paper.study import Study

_SYSTEMS_PANEL = "Systems"

Node = Annotated[str, typer.Option(rich_help_panel=NODE_PANEL, help=NODE_HELP)]
Workload = Annotated[
    str,
    typer.Option(
        rich_help_panel=ROWS_PANEL,
        help="Length profile: sharegpt, longbench, templated, a .yaml file of your own, or a .jsonl file of a table's "
        "recorded lengths (prompt_tokens and completion_tokens on each line).",
    ),
]
Requests = Annotated[
    int,
    typer.Option(
        min=1,
        rich_help_panel=ROWS_PANEL,
        help="Requests drawn from the profile; a .jsonl file is replayed whole.",
    ),
]
Systems = Annotated[
    str,
    typer.Option(
        rich_help_panel=_SYSTEMS_PANEL,
        help="all, baselines (PipeMax and other systems), or comma-separated names.",
    ),
]
PlotDirectory = Annotated[
    Path | None,
    typer.Option(
        "--plot", rich_help_panel=OUTPUT_PANEL, help="Draw the paper's figures as PNGs in this directory."
    ),
]
ChromeTrace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        rich_help_panel=OUTPUT_PANEL,
        help="Write the pipeline's steps and copies for chrome://tracing or Perfetto; those of PipeMax, or of the "
        "first system if PipeMax is not among them.",
    ),
]
Decisions = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=OUTPUT_PANEL, help="Record PipeMax's decisions, for `pipemax trace explain FILE`."
    ),
]


def simulate(
    node: Node = "rtx5090x8",
    model: Model = "llama2-70b",
    workload: Workload = "sharegpt",
    requests: Requests = 5000,
    system: Systems = "baselines",
    seed: Seed = 0,
    kv_dtype: KvDtype = KvCacheDtype.AUTO,
    changes: Changes = None,
    json_file: JsonFile = None,
    plot: PlotDirectory = None,
    trace: ChromeTrace = None,
    decisions: Decisions = None,
) -> None:
    """Simulate PipeMax and other systems on a node, and compare them.

    Prints total and output tokens/s, ratios to vLLM (TP), decode batches, bubbles and link use. Steady tokens/s
    leave out the drain at the end of the run. PipeMax is the real decision code on a virtual clock. A run of 5,000
    requests takes about 20 s per system.

    Example: python -m lab.paper --node l20x8 --model llama2-70b --workload longbench --requests 2000
    """
    from rich.console import Console

    from lab.paper.lengths import open_workload
    from lab.paper.study import REFERENCE, named_systems, run_study
    from lab.paper.study_report import json_objects, write_chrome_trace
    from lab.paper.study_table import table
    from pipemax.presets import load_model

    with one_line_errors():
        spec = changed_node(node, changes or [])
        lengths = open_workload(workload, requests, seed)
        systems = named_systems(system, spec)
        detailed = "pipemax" if "pipemax" in systems else next(iter(systems), None)
        if decisions and detailed != "pipemax":
            raise ValueError(
                f"--decisions records PipeMax's decisions: add pipemax to --system, which names only {system}"
            )
        with _progress(len({*systems, REFERENCE}) * len(lengths)) as on_progress:
            study = run_study(
                spec,
                load_model(model).with_kv_dtype(kv_dtype),
                lengths,
                systems,
                detailed=detailed if trace or decisions else None,
                decisions_path=decisions,
                on_progress=on_progress,
            )
        Console(width=None if Console().is_terminal else FILE_COLUMNS).print(table(study))
        if json_file:
            write_json(json_file, json_objects(study))
        if trace:
            write_chrome_trace(next(r for r in study.results if r.system == detailed), trace)
        if plot:
            _draw(study, plot)


def _draw(study: "Study", directory: Path) -> None:
    try:
        from lab.paper.plots import write_plots
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs {error.name}: pip install {error.name}") from error
    for path in write_plots(study, directory):
        typer.echo(path)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show the requests finished over all systems as a bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=total)
        finished: dict[str, int] = {}

        def report(system: str, num_finished: int) -> None:
            finished[system] = num_finished
            bar.update(task, description=system, completed=sum(finished.values()))

        yield report


if __name__ == "__main__":
    typer.run(simulate)
