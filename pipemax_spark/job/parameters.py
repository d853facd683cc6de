"""Make the parameters of a command from the job's options."""

import inspect
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Annotated, get_type_hints

import typer

from pipemax.wire import PACKAGE_VERSION, GenerationSpec
from pipemax_spark.job.arguments import OPTIONS, Option
from pipemax_spark.options import JobOptions
from pipemax_spark.request.prompts import PromptSource


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipemax {PACKAGE_VERSION}")
        raise typer.Exit


def command_parameters(
    *, optional: Collection[str] = (), hidden: Collection[str] = ()
) -> list[inspect.Parameter]:
    """Return the command's parameters: ``OPTIONS``, which fill the fields of a job's options, and ``--version``.

    Those of ``optional`` are None if they are not given, and ``--help`` leaves out those of ``hidden``.
    """
    kinds = (JobOptions, PromptSource, GenerationSpec)
    types = {name: kind for owner in kinds for name, kind in get_type_hints(owner).items()}
    defaults = {field.name: field.default for kind in kinds for field in fields(kind)}

    def parameter(name: str, option: Option) -> inspect.Parameter:
        is_flag = option.cli_type is None and types[name] is bool
        declared = typer.Option(
            *([f"--{name.replace('_', '-')}"] if is_flag else []),
            help=option.help,
            rich_help_panel=option.panel,
            hidden=name in hidden,
            **option.typer,
        )
        default = defaults.get(name, MISSING)
        kind = types[name] if option.cli_type is None else option.cli_type | None
        if option.cli_type is not None:
            default = None if option.show is None else option.show(default)
        if name in optional:
            default, kind = None, kind | None
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[kind, declared],
        )

    version = typer.Option(
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version.",
        rich_help_panel=OPTIONS["dry_run"].panel,
    )
    return [
        *(parameter(name, option) for name, option in OPTIONS.items()),
        inspect.Parameter(
            "version",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, version],
        ),
    ]
