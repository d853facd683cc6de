"""Reference pages, written from the code: commands, engine config, Python functions, errors and exit codes."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from itertools import pairwise
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from pyspark.sql.pandas.types import from_arrow_type

import pipemax_spark
import pipemax_spark.cli
from pipemax import config, endpoint_config, wire
from pipemax.api import OfflineEngine
from pipemax.generation import CARRIED, SETTINGS, Sampling
from pipemax_spark import errors
from pipemax_spark.cli import command
from pipemax_spark.report.samples import RUN_METRICS, total_metric
from pipemax_spark.report.summary import Summary


def command_line() -> str:
    """Return the page of all commands, with their options by group."""
    parts = [
        "# Command line\n\nMade from the code: what `--help` says. `pipemax-annotate` is another name of "
        "`pipemax annotate`. `pipemax --install-completion` sets up completion for your shell.\n",
        *_command("pipemax", typer.main.get_command(command()), level=2),
    ]
    return "\n".join(parts)


def engine_yaml() -> str:
    """Return the page of the engine config's fields."""
    parts = [
        "# engine.yaml\n\nMade from the code (`pipemax/config.py`). Every field except `model` has a default; an "
        "unknown field is refused.\n"
    ]
    parts += _fields(config.EngineConfig)
    nested = [kind for kind in _classes_in(config) if issubclass(kind, BaseModel)]
    for kind in nested:
        if kind is not config.EngineConfig:
            parts += [f"## {kind.__name__}\n\n{inspect.getdoc(kind)}\n", *_fields(kind)]
    for kind in _classes_in(config):
        if issubclass(kind, Enum):
            parts += [f"## {kind.__name__}\n\n{inspect.getdoc(kind)}\n", *_members(kind)]
    parts.append(
        "## Endpoints\n\nA config with `endpoint` has these fields instead, of `pipemax/endpoint_config.py`; the job "
        "sets `server` and `executors` ([Endpoints](../guide/endpoints.md)).\n"
    )
    parts += _fields(endpoint_config.EndpointConfig)
    for kind in (endpoint_config.Address, endpoint_config.ServerFacts):
        parts += [f"### {kind.__name__}\n\n{inspect.getdoc(kind)}\n", *_fields(kind)]
    return "\n".join(parts)


def python_api() -> str:
    """Return the page of the functions and classes that users call."""
    parts = ["# Python API\n\nMade from the code: what `help()` says.\n\n## On Spark: `pipemax_spark`\n"]
    for name in pipemax_spark._MODULES:
        parts += _function(f"pipemax_spark.{name}", getattr(pipemax_spark, name))
    parts.append("## Without Spark: `pipemax`\n")
    for kind in (OfflineEngine, Sampling):
        parts.append(f"### {kind.__name__}\n\n{_prose(kind)}\n")
        if kind is OfflineEngine:
            for name, method in vars(kind).items():
                if inspect.isfunction(method) and not name.startswith("_"):
                    parts += _function(f"{kind.__name__}.{name}", method, level=4)
    return "\n".join(parts)


def error_list() -> str:
    """Return the page of error codes, exceptions and exit codes."""
    exit_codes = next(line for line in inspect.getdoc(pipemax_spark.cli).splitlines() if "Exit codes" in line)
    parts = [
        "# Errors and exit codes\n\nMade from the code. [Rows that fail](../guide/errors.md) says what a job does "
        f"about them.\n\n{exit_codes}\n\n## Errors of rows: `annotation.error.code`\n",
        *_members(wire.ErrorCode),
        "## Errors that end a session\n\nA job that meets one ends with its message, which says what to change.\n",
        *_members(wire.SessionErrorCode),
        "## Exceptions in Python\n",
    ]
    parts += [
        f"- `{kind.__name__}` ({', '.join(base.__name__ for base in kind.__bases__)}): {_prose(kind)}"
        for kind in _classes_in(errors)
        if issubclass(kind, Exception)
    ]
    return "\n".join(parts) + "\n"


def _command(name: str, command: Any, *, level: int) -> list[str]:
    if command.hidden:
        return []
    parts = [f"{'#' * level} `{name}`\n", _help_text(command)]
    groups: dict[str, list[Any]] = {}
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        panel = getattr(parameter, "rich_help_panel", None) or "Options"
        groups.setdefault(panel, []).append(parameter)
    for panel, parameters in groups.items():
        parts.append(f"| {panel} | |\n|---|---|")
        parts += [_option_row(parameter) for parameter in parameters]
        parts.append("")
    for each, sub in getattr(command, "commands", {}).items():
        parts += _command(f"{name} {each}", sub, level=level + 1)
    return parts


def _help_text(command: Any) -> str:
    text = re.sub(r"(?m)^  ", " " * 4, inspect.cleandoc(command.help or ""))  # examples are blocks of code
    return text.replace("\f", "") + "\n"


def _option_row(parameter: Any) -> str:
    names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
    help_text = " ".join((getattr(parameter, "help", None) or "").split())
    default = parameter.default
    shown = getattr(parameter, "show_default", False)
    notes = []
    if parameter.required:
        notes.append("Required.")
    elif shown and default not in (None, False, (), []):
        notes.append(f"Default: `{default.value if isinstance(default, Enum) else default}`.")
    return _row(names, " ".join([help_text, *notes]))


def _fields(kind: type[BaseModel]) -> list[str]:
    rows = ["| field | default | |\n|---|---|---|"]
    for name, field in kind.model_fields.items():
        default = "required"
        if field.default is not PydanticUndefined:
            value = field.default.value if isinstance(field.default, Enum) else field.default
            default = "—" if value is None else f"`{value}`"
        elif field.default_factory is not None:
            default = "—"
        rows.append(_row(f"`{name}`", default, f"{field.description or ''} {_kind_note(field.annotation)}"))
    return [*rows, ""]


def _kind_note(annotation: Any) -> str:
    named = [each for each in (annotation, *get_args(annotation)) if inspect.isclass(each)]
    links = [
        each.__name__
        for each in named
        if issubclass(each, Enum | BaseModel) and each.__module__ == config.__name__
    ]
    return " ".join(f"See [{name}](#{name.lower()})." for name in links)


def _members(kind: type[Enum]) -> list[str]:
    documented = _attribute_docs(kind)
    rows = ["| | |\n|---|---|"]
    rows += [_row(f"`{member.value}`", documented.get(member.name, "")) for member in kind]
    return [*rows, ""]


def _attribute_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each attribute of the class."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for line, following in pairwise(body):
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr):
            target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
            docs[target.id] = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]
    return docs


def _function(name: str, function: Any, *, level: int = 3) -> list[str]:
    signature = inspect.signature(function)
    lines = [
        f"    {parameter}," for parameter in map(str, signature.parameters.values()) if parameter != "self"
    ]
    text = re.sub(
        r"\b(?:pipemax_spark|pipemax|pyspark|collections|datetime|os|pathlib|typing)(?:\.\w+)*\.(\w+)",
        r"\1",
        "\n".join(lines),
    )
    text = re.sub(r": '([^']+)'", r": \1", text)  # annotations that Python has not evaluated
    returned = (
        ""
        if signature.return_annotation is inspect.Signature.empty
        else f" -> {_name(signature.return_annotation)}"
    )
    return [
        f"{'#' * level} {name.rpartition('.')[2]}\n",
        f"```python\n{name}(\n{text}\n){returned}\n```\n"
        if lines
        else f"```python\n{name}(){returned}\n```\n",
        _prose(function) + "\n",
    ]


def _name(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _prose(documented: Any) -> str:
    """Return a docstring as Markdown: code in backticks, examples in blocks, arguments as a list."""
    text = (inspect.getdoc(documented) or "").replace("``", "`")
    text = re.sub(r"(?m)^(Args|Returns|Raises|Yields|Attributes):$", r"\n**\1**\n", text)
    text = re.sub(r"(?m)^(?:(?:>>>|\.\.\.) .*\n?)+", lambda lines: _example(lines[0]), text)
    return re.sub(r"(?m)^ {4}(\w+): ", r"- `\1`: ", text)


def _example(lines: str) -> str:
    return "```python\n" + "\n".join(line[4:] for line in lines.splitlines()) + "\n```\n"


def _classes_in(module: Any) -> Iterator[type]:
    return (
        each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__
    )


def _row(*cells: str) -> str:
    return (
        "| "
        + " | ".join(
            cell.strip().replace("|", "\\|").replace("<", "&lt;").replace("\n", " ") for cell in cells
        )
        + " |"
    )


def metrics() -> str:
    """Return the page of a run's metrics in MLflow."""
    rows = ["| metric | |\n|---|---|"]
    rows += [_row(f"`{group}/{name}`", told) for name, (group, told) in RUN_METRICS.items()]
    totals = [
        _row(f"`{total_metric(each.name)}`", documented.get(each.name, ""))
        for documented in [_attribute_docs(Summary)]
        for each in fields(Summary)
        if each.type in ("int", "float", int, float)
    ]
    return "\n".join(
        [
            "# Metrics of a run\n\nMade from the code: what a job records in MLflow. [When a run is slow]"
            "(../guide/slow-run.md#the-picture-and-the-figures) has the other figures of `engine_metrics.parquet`.\n",
            "## While it runs\n",
            *rows,
            "\n## At its end\n",
            "| metric | |\n|---|---|",
            *totals,
            _row("`time/…_s`", "Seconds of the engines by what they did: the time account."),
            _row(
                "`total/accuracy`",
                "Share of rows that agree with the label column (`--gold-column`); with questions "
                "`total/accuracy_QUESTION`.",
            ),
            "\nParameters are the input, its version, the engine config, the generation and Spark settings; the input "
            "is the run's dataset. Artifacts are `report.html`, `summary.json`, `throughput.svg` and "
            "`engine_metrics.parquet`.\n",
        ]
    )


def row_settings() -> str:
    """Return the table of what a row may set."""
    rows = ["| setting | type | in a request of OpenAI's format | |\n|---|---|---|---|"]
    rows += [
        _row(
            f"`{name}`",
            f"`{_spark_type(setting.row_type)}`",
            ", ".join(f"`{each}`" for each in setting.openai_names) or "—",
            setting.help,
        )
        for name, setting in SETTINGS.items()
        if setting.row_type is not None
    ]
    return "\n".join(rows)


def annotation() -> str:
    """Return the table of what an annotation carries."""
    rows = ["| `annotation.` | type | |\n|---|---|---|"]
    rows += [
        _row(f"`{name}`", f"`{_spark_type(carried.wire_type)}`", carried.help)
        for name, carried in CARRIED.items()
    ]
    return "\n".join(rows)


def _spark_type(kind: Any) -> str:
    text: str = from_arrow_type(kind).simpleString()
    return text


TABLES = {"row settings": row_settings, "annotation": annotation}
"""Comment ``<!-- table: NAME -->`` of a page, and what makes the table that the site has in its place."""

PAGES = {
    "reference/command-line.md": command_line,
    "reference/engine-yaml.md": engine_yaml,
    "reference/python.md": python_api,
    "reference/errors.md": error_list,
    "reference/metrics.md": metrics,
}
"""The path of each generated page, and what makes it."""
