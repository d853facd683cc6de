"""``pipemax-annotate``: reads the command line, runs the job, and turns failures into sentences and exit codes.

Exit codes: 0 done, 1 failed while running, 2 something to mend in the call or the input, 130 interrupted.
"""

import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pipemax.wire import PACKAGE_VERSION, GenerationSpec

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich", add_completion=False)

_INPUT, _PROMPT, _MODEL = "Input and output", "Prompt", "Model and generation"
_LOG_WIDTH = 160
"""Columns of the report where no terminal says its own."""
_ROWS, _RUN = "Errors and reruns", "Run"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipemax-annotate {PACKAGE_VERSION}")
        raise typer.Exit


@app.command()
def annotate(
    input: Annotated[  # noqa: A002
        str,
        typer.Option(
            help="Delta path or table name; or a Parquet, CSV or JSON path.", rich_help_panel=_INPUT
        ),
    ],
    output: Annotated[
        str, typer.Option(help="Delta path or table name; made where it is missing.", rich_help_panel=_INPUT)
    ],
    input_format: Annotated[
        str | None,
        typer.Option(
            help="delta, parquet, csv or json; default: by the path's ending.", rich_help_panel=_INPUT
        ),
    ] = None,
    input_option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for Spark's reader; may be repeated.", rich_help_panel=_INPUT),
    ] = None,
    id_columns: Annotated[
        str | None,
        typer.Option(
            help="Columns that tell rows apart, comma-separated; default: the whole row's content.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many new rows.", rich_help_panel=_INPUT)
    ] = None,
    prompt_column: Annotated[
        str | None, typer.Option(help="Column that is the prompt.", rich_help_panel=_PROMPT)
    ] = None,
    messages_column: Annotated[
        str | None, typer.Option(help="Column of array<struct<role, content>>.", rich_help_panel=_PROMPT)
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="Prompt with {column} in it; {{ and }} are braces, \\n a new line.", rich_help_panel=_PROMPT
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message before every prompt.", rich_help_panel=_PROMPT)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint directory or hub name; or in --engine.", rich_help_panel=_MODEL),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(help="Engine config, YAML; every field has a default.", rich_help_panel=_MODEL),
    ] = None,
    engine_python: Annotated[
        str | None,
        typer.Option(
            help="Python with vLLM, on the executors; default: the job's own.", rich_help_panel=_MODEL
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most output tokens of a row.", rich_help_panel=_MODEL)
    ] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_MODEL)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.", rich_help_panel=_MODEL)] = 1.0,
    seed: Annotated[int | None, typer.Option(help="For repeatable sampling.", rich_help_panel=_MODEL)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; may be repeated.", rich_help_panel=_MODEL)
    ] = None,
    response_format: Annotated[
        Path | None, typer.Option(help="File with a JSON schema for the output.", rich_help_panel=_MODEL)
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="row: keep it with its error; fail: end the job.", rich_help_panel=_ROWS)
    ] = "row",
    max_error_rate: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="After 1,000 rows, a larger share ends the job.", rich_help_panel=_ROWS
        ),
    ] = 0.5,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Do error rows anew.", rich_help_panel=_ROWS)
    ] = False,
    new_spec: Annotated[
        bool,
        typer.Option(
            "--new-spec",
            help="Allow another model, template or schema in this output.",
            rich_help_panel=_ROWS,
        ),
    ] = False,
    work_dir: Annotated[
        str | None,
        typer.Option(
            help="Shared storage for work in progress; default: in the output.", rich_help_panel=_RUN
        ),
    ] = None,
    commit_every: Annotated[str, typer.Option(help="Such as 15m, 900s or 1h.", rich_help_panel=_RUN)] = "15m",
    mlflow_experiment: Annotated[
        str, typer.Option(help="MLflow experiment.", rich_help_panel=_RUN)
    ] = "pipemax",
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0.0, help="Of the whole cluster; shows the cost.", rich_help_panel=_RUN),
    ] = None,
    gold_column: Annotated[
        str | None,
        typer.Option(
            help="Right answers: compared with the response's property of that name.", rich_help_panel=_RUN
        ),
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Write the totals here, JSON.", rich_help_panel=_RUN)
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Logs; default: $PIPEMAX_LOG_DIR or a temporary one.", rich_help_panel=_RUN),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and count; run nothing.", rich_help_panel=_RUN)
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Annotate every row of a table with a language model; outputs go to a Delta table, metrics to MLflow.

    A rerun does only what is left. Example:

    pipemax-annotate --input tickets --output tickets_labelled --id-columns id --model org/name
    --template "Summarise: {body}" --max-tokens 100
    """
    from pipemax_spark.job import AnnotationJob, JobFailedError, JobOptions
    from pipemax_spark.prompts import PromptSource
    from pipemax_spark.session import get_session

    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    log_path = log_dir or Path(
        os.environ.get("PIPEMAX_LOG_DIR") or Path(tempfile.gettempdir()) / f"pipemax-{os.getuid()}"
    )
    _log_to_file(log_path)
    try:
        options = JobOptions(
            input=_absolute_if_path(input),
            output=_absolute_if_path(output),
            source=PromptSource(
                prompt_column=prompt_column,
                messages_column=messages_column,
                template=None if template is None else template.replace("\\n", "\n"),
            ),
            engine=_engine(engine, model),
            generation=GenerationSpec(
                system=system,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                stop=tuple(stop or ()),
                seed=seed,
                response_format=None if response_format is None else _schema_text(response_format),
            ),
            id_columns=tuple(name.strip() for name in (id_columns or "").split(",") if name.strip()),
            input_format=input_format,
            input_options=dict(_key_value(option) for option in input_option or ()),
            engine_python=engine_python,
            fails_on_error=_fails_on_error(on_error),
            max_error_rate=max_error_rate,
            retries_errors=retry_errors,
            allows_new_spec=new_spec,
            work_dir=work_dir,
            commit_every_s=_seconds(commit_every),
            limit=limit,
            mlflow_experiment=mlflow_experiment,
            price_per_hour=price_per_hour,
            gold_column=gold_column,
            summary_file=summary,
            is_dry_run=dry_run,
            log_dir=log_path.absolute(),
        )
        spark = get_session("pipemax-annotate")
        AnnotationJob(spark, options, console).run()
        spark.stop()
    except ValueError as error:  # JobError and what the argument types refuse
        logging.getLogger(__name__).info("refused", exc_info=True)
        _fail(console, str(error), 2)
    except JobFailedError as error:
        _fail(console, f"{error}. Chunks committed so far are kept; run the same command again to go on", 1)
    except KeyboardInterrupt:
        _fail(console, "interrupted; committed chunks are kept, and the same command goes on from there", 130)
    except Exception as error:
        logging.getLogger(__name__).exception("the job failed")
        _fail(
            console,
            f"{_cause(error)}\nDetails: {log_path.absolute()}. The same command goes on from there",
            1,
        )


def _fail(console: Console, text: str, code: int) -> None:
    console.print(f"Error: {text}", style="bold red" if console.is_terminal else None, markup=False)
    raise typer.Exit(code)


def _cause(error: Exception) -> str:
    """The sentence of the exception that a task raised, out of Spark's and Python's traces around it."""
    text = str(error)
    ours = re.findall(r"^(?:\S+\.)?(?:EngineSessionError|RowFailedError|JobError): (.*)$", text, re.MULTILINE)
    return (
        ours[0] if ours else next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    )


def _log_to_file(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=directory / "annotate.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.captureWarnings(True)
    logging.getLogger("py4j").setLevel(logging.WARNING)


def _absolute_if_path(name: str) -> str:
    """A local path as executors and servers understand it, wherever they run; names and URLs as they are."""
    from pipemax_spark.tables import is_path

    if not is_path(name) or re.match(r"^[a-z][a-z0-9+.-]*:", name):
        return name
    return str(Path(name).absolute())


def _engine(file: Path | None, model: str | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if file is not None:
        import yaml

        from pipemax_spark.errors import JobError

        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            raise JobError(f"engine config {str(file)!r} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise JobError(f"engine config {str(file)!r} must hold 'name: value' lines")
    if model is not None:
        values["model"] = model
    if "model" not in values:
        raise ValueError("no model is named; give --model, or --engine with a line 'model: …'")
    if Path(str(values["model"])).is_dir():
        values["model"] = str(Path(values["model"]).absolute())
    return values


def _schema_text(file: Path) -> str:
    from pipemax_spark.response_format import load_schema

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"response-format {str(file)!r} cannot be read: {error}") from error
    load_schema(text)
    return text


def _fails_on_error(value: str) -> bool:
    if value not in ("row", "fail"):
        raise ValueError(f"on-error is {value!r}, must be 'row' or 'fail'")
    return value == "fail"


def _key_value(option: str) -> tuple[str, str]:
    key, separator, value = option.partition("=")
    if not separator:
        raise ValueError(f"input-option {option!r} is not of the form KEY=VALUE")
    return key, value


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"commit-every is {text!r}; write it as 15m, 900s or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
