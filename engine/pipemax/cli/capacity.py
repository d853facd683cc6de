"""``pipemax plan-capacity``: estimate a table's hours and cost on nodes, for every layout and policy."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipemax.cli.capacity_cascade import CascadeHours, Kept, Small, small_model
from pipemax.cli.common import (
    FILE_COLUMNS,
    NODE_HELP,
    NODE_PANEL,
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
    from rich.table import Table

    from pipemax.cli.planned_model import PlannedModel
    from pipemax.domain.specs import ModelSpec, NodeSpec
    from pipemax.domain.workload import LengthStatistics, WorkloadSpec
    from pipemax.policy.capacity import CapacityOption, CapacityPlan
    from pipemax.sim.workloads import SampledRows

_GB = 1e9

_MULTIPLES = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000, "g": 1_000_000_000}


def count_of_rows(text: str) -> int:
    """Return a number of rows such as ``250000``, ``250k``, ``1.5M`` or ``2B``. Raise ``BadParameter`` for others."""
    match = re.fullmatch(r"([\d_,]*\.?\d+)\s*([kmbg]?)", text.strip().lower())
    rows = float(match[1].replace(",", "").replace("_", "")) * _MULTIPLES[match[2]] if match else 0.0
    if rows < 1 or rows != int(rows):
        raise typer.BadParameter(f"{text!r} is no number of rows: 250000, 250k, 1M and 2B are")
    return int(rows)


Rows = Annotated[
    int,
    typer.Option(
        parser=count_of_rows,
        metavar="ROWS",
        rich_help_panel=ROWS_PANEL,
        help="Rows of the table: 250000, 250k, 1M, 2B.",
    ),
]
Nodes = Annotated[
    list[str],
    typer.Option(
        "--node",
        rich_help_panel=NODE_PANEL,
        help=f"{NODE_HELP} Repeat it to compare kinds of node.",
    ),
]
Prices = Annotated[
    list[float] | None,
    typer.Option(
        "--price",
        min=0.0,
        rich_help_panel=NODE_PANEL,
        help="Price of a node per hour, in any currency; one for each --node, in the same order. Left out: hours only.",
    ),
]
Profile = Annotated[
    str,
    typer.Option(
        "--workload",
        rich_help_panel=ROWS_PANEL,
        help="Length profile to start from: sharegpt, longbench, templated, reasoning, or a .yaml file of your own.",
    ),
]
HostMemory = Annotated[
    list[float] | None,
    typer.Option(
        "--host-memory",
        metavar="GB",
        rich_help_panel=NODE_PANEL,
        help="Host memory size to compare. Repeatable.",
    ),
]
Divisions = Annotated[
    list[int] | None,
    typer.Option(
        "--gpus-per-engine",
        min=1,
        rich_help_panel=NODE_PANEL,
        help="GPUs per engine to compare. Repeatable; default: every number that divides the node's GPUs.",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=ROWS_PANEL,
        help="Rows to simulate for each layout, fewer if they fill its KV pools several times. Layouts that they do "
        "not fill are left out. Default: 6,000, or as many as fill the GPUs of all layouts.",
    ),
]

InputTable = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="PATH",
        rich_help_panel=ROWS_PANEL,
        help="Delta table or Parquet files whose prompts' lengths count, in place of a length profile: 10,000 rows are "
        "sampled. With --template or --prompt-tokens-column, and --output-mean or --outputs-of.",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=ROWS_PANEL, help="The job's template, with columns of --input: 'Summarise: {body}'."
    ),
]
TokensColumn = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=ROWS_PANEL, help="Column of --input with the prompt's tokens, in place of --template."
    ),
]
OutputsOf = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        rich_help_panel=ROWS_PANEL,
        help="Output table of an earlier run, whose outputs' lengths count (annotation.completion_tokens).",
    ),
]

HasWaves = Annotated[
    bool,
    typer.Option(
        "--waves",
        rich_help_panel=NODE_PANEL,
        help="Simulate PipeMax with waves: on in its engine config. On GPUs only their tokens were compared.",
    ),
]


def plan_capacity(
    rows: Rows,
    price: Prices = None,
    node: Nodes = ["rtx5090x8"],  # noqa: B006  # which typer copies
    model: Model = "llama2-70b",
    workload: Profile = "sharegpt",
    prompt_mean: Annotated[
        float | None, typer.Option(rich_help_panel=ROWS_PANEL, help="Mean prompt length in tokens.")
    ] = None,
    prompt_median: Annotated[
        float | None, typer.Option(rich_help_panel=ROWS_PANEL, help="Median prompt length in tokens.")
    ] = None,
    output_mean: Annotated[
        float | None, typer.Option(rich_help_panel=ROWS_PANEL, help="Mean output length in tokens.")
    ] = None,
    output_median: Annotated[
        float | None, typer.Option(rich_help_panel=ROWS_PANEL, help="Median output length in tokens.")
    ] = None,
    table: InputTable = None,
    template: Template = None,
    prompt_tokens_column: TokensColumn = None,
    outputs_of: OutputsOf = None,
    host_memory: HostMemory = None,
    gpus_per_engine: Divisions = None,
    sample: Sample = None,
    cascade: Small = None,
    kept: Kept = None,
    seed: Seed = 0,
    kv_dtype: KvDtype = KvCacheDtype.AUTO,
    waves: HasWaves = False,
    changes: Changes = None,
    json_file: JsonFile = None,
) -> None:
    """Estimate a table's hours and cost on one or more kinds of node, and recommend a layout and policy.

    Simulates rows with the table's length statistics under each layout (replicas × tensor parallelism × pipeline
    stages) and policy, each with its fastest step size. This takes up to a few minutes. The estimate uses the steady
    rate for the bulk of the table, and counts the drain once. A replica is an executor with tp × pp GPUs.
    N nodes take the hours of one divided by N, and their start-up.

    Example: pipemax plan-capacity --rows 10M --price 20 --prompt-mean 500 --prompt-median 400
    """
    from rich.console import Console

    from pipemax.cli.planned_model import planned_model
    from pipemax.cli.table_lengths import TableSource
    from pipemax.policy.capacity import plan_capacity as plan_options

    with one_line_errors():
        if price and len(price) != len(node):
            raise ValueError(f"{len(node)} nodes and {len(price)} prices: give --price once for each --node")
        statistics = length_statistics(
            workload,
            {"mean": prompt_mean, "median": prompt_median},
            {"mean": output_mean, "median": output_median},
        )
        planned = planned_model(model)
        console = Console(width=None if Console().is_terminal else FILE_COLUMNS)
        lengths: WorkloadSpec | SampledRows = statistics
        if table is not None:
            if output_mean is None and outputs_of is None:
                raise ValueError("--input says how long prompts are: give --output-mean or --outputs-of too")
            console.print(f"sampling {table}", highlight=False)
            source = TableSource(table, template, prompt_tokens_column, outputs_of, planned.directory, seed)
            lengths, counted = source.sampled_rows(statistics.output)
            console.print(counted, highlight=False)
        elif template or prompt_tokens_column or outputs_of:
            raise ValueError("--template, --prompt-tokens-column and --outputs-of go with --input")
        small = None if (name := small_model(cascade, kept)) is None else planned_model(name)

        def plan_of(model: "PlannedModel", spec: "NodeSpec", hourly: float | None) -> "CapacityPlan":
            with _progress() as show:
                return plan_options(
                    spec,
                    model.shapes.with_kv_dtype(kv_dtype),
                    lengths,
                    rows=rows,
                    price_per_hour=hourly,
                    host_memory_bytes=[size * _GB for size in host_memory or ()],
                    gpus_per_engine=gpus_per_engine or (),
                    sample_rows=sample,
                    has_waves=waves,
                    stock_only=model.refusal,
                    seed=seed,
                    on_progress=show,
                )

        plans: list[_NodePlan] = []
        cascades: list[dict[str, Any]] = []
        prices: list[float | None] = [*price] if price else [None] * len(node)
        for name, hourly in zip(node, prices, strict=True):
            spec = changed_node(name, changes or [])
            console.print(_first_line(rows, planned.shapes, spec), highlight=False)
            plan = plan_of(planned, spec, hourly)
            console.print(_table(plan, spec, kv_dtype, has_waves=waves))
            console.print(f"chosen: {plan.chosen}. {plan.reason}.", highlight=False)
            for reason in plan.not_possible:
                console.print(f"left out: {reason}", highlight=False)
            plans.append(_NodePlan(node=spec.name, plan=plan))
            if small is not None and kept is not None:
                both = CascadeHours(
                    models=(small.shapes.name, planned.shapes.name),
                    small_hours=plan_of(small, spec, hourly).chosen.hours,
                    large_hours=plan.chosen.hours,
                    kept=kept,
                    price_per_hour=hourly,
                )
                console.print(both.sentence(rows), highlight=False)
                cascades.append({"node": spec.name, "cascade": both.facts()})
        if len(plans) > 1:
            console.print(_comparison(plans), highlight=False)
        if json_file:
            write_json(
                json_file,
                [
                    _json_object(node_plan, option, kv_dtype, has_waves=waves)
                    for node_plan in plans
                    for option in node_plan.plan.options
                ]
                + cascades,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodePlan:
    """The options of one kind of node."""

    node: str
    plan: "CapacityPlan"


def _first_line(rows: int, model: "ModelSpec", node: "NodeSpec") -> str:
    gpus = f"{node.num_gpus} × {node.gpu.name}"
    weights = f"{model.num_params / 1e9:,.1f}B parameters, {model.weight_bytes / _GB:,.0f} GB of weights"
    return f"planning {rows:,} rows by {model.name} ({weights}) on {node.name} ({gpus})"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal's standard error; yield the function that moves it to layouts done, of all."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating layouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("layouts", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def length_statistics(
    profile: str, prompt: dict[str, float | None], output: dict[str, float | None]
) -> "WorkloadSpec":
    """Return a profile's length statistics, with the means and medians that the caller gave in their place.

    A mean without a median moves the profile's median with it.
    """
    from dataclasses import replace

    from pipemax.presets import load_workload

    spec = load_workload(profile)

    def changed(side: "LengthStatistics", values: dict[str, float | None]) -> "LengthStatistics":
        mean, median = values["mean"], values["median"]
        if mean is not None and median is None:
            median = max(side.least, side.median * mean / side.mean)
        return replace(
            side,
            mean=side.mean if mean is None else mean,
            median=side.median if median is None else median,
        )

    return replace(spec, prompt=changed(spec.prompt, prompt), output=changed(spec.output, output))


def _table(plan: "CapacityPlan", node: "NodeSpec", kv_dtype: KvCacheDtype, *, has_waves: bool) -> "Table":
    from rich.table import Table

    kv = "" if kv_dtype is KvCacheDtype.AUTO else f" with {kv_dtype} KV"
    waves = ", PipeMax with waves" if has_waves else ""
    gpus = f"{node.num_gpus} × {node.gpu.name}, {node.host_memory_bytes / _GB:,.0f} GB of host memory"
    sheet = Table(title=f"{plan.rows:,} rows on {node.name}{kv} ({gpus}){waves}, fastest first")
    sheet.add_column("policy")
    has_price = plan.chosen.cost is not None
    for heading in ("replicas", "tp", "pp", "step tokens", "host GB", "tok/s", "hours"):
        sheet.add_column(heading, justify="right")
    if has_price:
        sheet.add_column("cost", justify="right")
    sheet.add_column("limited by")
    for option in plan.options:
        layout = option.layout
        sheet.add_row(
            "vllm" if option.batching is None else f"pipemax {option.batching}",
            str(layout.replicas),
            str(layout.tensor_parallel),
            str(layout.pipeline_parallel),
            f"{option.chunk_tokens:,}",
            "" if option.batching is None else f"{option.host_memory_bytes / _GB:,.0f}",
            f"{option.tokens_per_s:,.0f}",
            f"{option.hours:,.1f}",
            *([f"{option.cost:,.0f}"] if has_price else []),
            option.limited_by,
            style="bold" if option is plan.chosen else None,
        )
    return sheet


def _comparison(plans: Sequence[_NodePlan]) -> str:
    """Return the fastest node, and the cheapest where prices are known."""

    def figures(plan: _NodePlan) -> str:
        chosen = plan.plan.chosen
        cost = "" if chosen.cost is None else f" for {chosen.cost:,.0f}"
        return f"{plan.node}, {chosen.hours:,.1f} hours{cost}"

    fastest = min(plans, key=lambda plan: plan.plan.chosen.hours)
    costs = {plan.node: plan.plan.chosen.cost for plan in plans}
    if any(cost is None for cost in costs.values()):
        return f"fastest: {figures(fastest)}"
    cheapest = min(plans, key=lambda plan: costs[plan.node] or 0.0)
    if cheapest is fastest:
        return f"cheapest and fastest: {figures(cheapest)}"
    return f"cheapest: {figures(cheapest)}; fastest: {figures(fastest)}"


def _json_object(
    node_plan: _NodePlan, option: "CapacityOption", kv_dtype: KvCacheDtype, *, has_waves: bool
) -> dict[str, Any]:
    return {
        "node": node_plan.node,
        "kv_dtype": kv_dtype.value,
        "replicas": option.layout.replicas,
        "tensor_parallel": option.layout.tensor_parallel,
        "pipeline_parallel": option.layout.pipeline_parallel,
        "policy": option.policy.value,
        "batching": None if option.batching is None else option.batching.value,
        "waves": has_waves and option.batching is not None,
        "chunk_tokens": option.chunk_tokens,
        "host_memory_bytes": option.host_memory_bytes,
        "tokens_per_s": round(option.tokens_per_s, 1),
        "mean_decode_batch": round(option.mean_decode_batch, 1),
        "hours": round(option.hours, 4),
        "cost": None if option.cost is None else round(option.cost, 4),
        "limited_by": option.limited_by,
        "chosen": option is node_plan.plan.chosen,
    }
