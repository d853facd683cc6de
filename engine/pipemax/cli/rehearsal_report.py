"""Report what ``pipemax rehearse`` found: a table of runs, the forecast, and the engine config lines to use."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from pipemax.cli.common import FILE_COLUMNS
from pipemax.policy.compare import WORTHWHILE_GAIN
from pipemax.rehearsal.candidates import EnginePart
from pipemax.rehearsal.steady_part import TableForecast, forecast_table, limiting_factor
from pipemax.sim.result import STEADY_SHARE
from pipemax.sim.workloads import Workload
from pipemax.vllm_ext.rehearsal.job import Rehearsed, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalReport:
    """Runs on one engine, and what they mean for the table on the whole node."""

    node: str
    model: str
    part: EnginePart
    table: str
    table_rows: int
    workload: Workload
    price_per_hour: float | None
    runs: Sequence[Rehearsed]
    """Fastest first."""
    not_possible: Sequence[str]
    unused: Sequence[str]
    """Fields of the engine config that a rehearsal does not use."""
    left_out: float
    """Share of the sampled rows that would be error rows in a job."""

    @property
    def chosen(self) -> Rehearsed:
        return choose(self.runs, WORTHWHILE_GAIN)

    def forecast(self, run: Rehearsed) -> TableForecast:
        """Return the table's time on the whole node."""
        return forecast_table(
            run.result.steady,
            run_seconds=run.result.seconds,
            run_tokens=self.workload.total_tokens,
            run_rows=len(self.workload),
            table_rows=round(self.table_rows * (1 - self.left_out)),
            num_engines=self.part.num_engines,
        )

    def show(self) -> None:
        """Print the report; the last lines are YAML for the engine config."""
        from rich.console import Console

        console = Console(width=None if Console().is_terminal else FILE_COLUMNS)
        console.print(self._sheet())
        for line in self._remarks():
            console.print(line, highlight=False, markup=False)
        typer.echo("\nengine.yaml:")
        for name, value in self.config_lines().items():
            typer.echo(f"  {name}: {value}")

    def config_lines(self) -> dict[str, Any]:
        """Return the fields of the engine config with which the chosen run was made."""
        layout = self.part.parallelism
        return {
            **self.chosen.candidate.config_values(),
            "pipeline_parallel_size": layout.pipeline,
            "tensor_parallel_size": layout.tensor,
        }

    def _sheet(self) -> Any:
        from rich import box
        from rich.table import Table

        layout, engines = self.part.parallelism, self.part.num_engines
        sheet = Table(
            title=f"{self.model} on {self.node}: {engines} × {layout.pipeline} stages of {layout.tensor} GPUs, "
            f"{len(self.workload):,} of {self.table_rows:,} rows of {self.table} on one engine",
            caption="tokens/s: prompts and outputs of the whole node; steady: until "
            f"{STEADY_SHARE:.0%} of the rows had ended; prompts, decode, mixed, idle: shares of steady time",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        sheet.add_column("engine", no_wrap=True)
        sheet.add_column("tokens\na step", justify="right", no_wrap=True)
        headings = [f"{name}\ntok/s" for name in ("simulated", "steady", "whole")]
        headings += [
            "steady\nrows/s",
            *(f"\n{name}" for name in ("prompts", "decode", "mixed", "idle", "hours")),
        ]
        for heading in headings + ([] if self.price_per_hour is None else ["\ncost"]):
            sheet.add_column(heading, justify="right", no_wrap=True)
        for run in self.runs:
            steady, forecast = run.result.steady, self.forecast(run)
            shares = (steady.prompts, steady.decode, steady.mixed, steady.idle)
            costs = () if self.price_per_hour is None else (forecast.hours * self.price_per_hour,)
            sheet.add_row(
                run.candidate.name,
                f"{run.candidate.chunk_tokens:,}",
                f"{run.simulated_tokens_per_s * engines:,.0f}",
                f"{forecast.tokens_per_s:,.0f}",
                f"{run.result.total_tokens_per_s * engines:,.0f}",
                _short(forecast.rows_per_s),
                *(f"{share:.0%}" for share in shares),
                *(_short(value) for value in (forecast.hours, *costs)),
            )
        return sheet

    def _remarks(self) -> list[str]:
        chosen = self.chosen
        forecast, kv = self.forecast(chosen), chosen.result.kv
        lines = [
            f"{chosen.candidate.name}: limited by {limiting_factor(chosen.result.steady, kv)}.",
            f"Hours: the table's rows at the steady rate, and the drain of {forecast.drain_s:,.0f} s as measured. "
            "Starting the engine and reading and writing the table are not included.",
            f"Peak KV use: {max(one.gpu for one in kv):.0%} of the GPUs', {max(one.host for one in kv):.0%} of the "
            f"host's; scheduler {chosen.result.host_ms_per_step:.2f} ms of CPU per step.",
            "Nothing was computed: vLLM's scheduler is real, but GPUs and links only took time, according to the "
            "node's profile.",
        ]
        if chosen is not self.runs[0]:
            lines.append(f"Stock vLLM is kept, because PipeMax gains less than {WORTHWHILE_GAIN - 1:.0%}.")
        if self.left_out:
            lines.append(
                f"Left out: {self.left_out:.1%} of the sampled rows, which have no prompt or one that is too long."
            )
        if self.unused:
            lines.append(f"Without effect here: {', '.join(self.unused)}.")
        return lines + [f"left out: {reason}" for reason in self.not_possible]

    def json_object(self) -> dict[str, Any]:
        """Return all figures, and the KV in use over each run as (seconds, share of GPUs', share of host's)."""
        return {
            "node": self.node,
            "model": self.model,
            "pipeline_stages": self.part.parallelism.pipeline,
            "tensor_parallel": self.part.parallelism.tensor,
            "engines": self.part.num_engines,
            "table": self.table,
            "table_rows": self.table_rows,
            "rehearsed_rows": len(self.workload),
            "mean_prompt_tokens": round(float(self.workload.prompt_tokens.mean()), 1),
            "mean_output_tokens": round(float(self.workload.output_tokens.mean()), 1),
            "shared_prefix_tokens": self.workload.shared_prefix_tokens,
            "chosen": self.chosen.candidate.name,
            "engine_config": self.config_lines(),
            "runs": [self._run_object(run) for run in self.runs],
            "not_possible": list(self.not_possible),
        }

    def _run_object(self, run: Rehearsed) -> dict[str, Any]:
        result, forecast = run.result, self.forecast(run)
        return {
            "engine": run.candidate.name,
            **run.candidate.config_values(),
            "simulated_tokens_per_s": round(run.simulated_tokens_per_s * self.part.num_engines, 1),
            "steady_tokens_per_s": round(forecast.tokens_per_s, 1),
            "total_tokens_per_s": round(result.total_tokens_per_s * self.part.num_engines, 1),
            "rows_per_s": round(forecast.rows_per_s, 3),
            "hours": forecast.hours,
            "cost": None if self.price_per_hour is None else forecast.hours * self.price_per_hour,
            "drain_s": round(forecast.drain_s, 3),
            "seconds": round(result.seconds, 3),
            "steps": result.num_steps,
            "scheduler_ms_per_step": round(result.host_ms_per_step, 3),
            "limited_by": limiting_factor(result.steady, result.kv),
            "steady": asdict(result.steady) | {"idle": result.steady.idle},
            "kv": [(round(one.time_s, 3), round(one.gpu, 4), round(one.host, 4)) for one in result.kv],
        }

    def draw(self, path: Path) -> None:
        """Draw the KV in use over each run."""
        from pipemax.sim.plots import plot_kv_use

        runs = {
            f"{run.candidate.name}, {run.candidate.chunk_tokens:,} tokens a step": [
                (one.time_s, one.gpu, one.host) for one in run.result.kv
            ]
            for run in self.runs
        }
        plot_kv_use(runs, path)


def _short(value: float) -> str:
    """Format a number with as many decimals as its size needs."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"
