"""Write a command's help as GNU tools do: an option on a line of its own, and below it what it does.

Lines are as wide as the terminal, up to 80 columns. No option, type or command is broken or cut. The help of
``pipemax`` and of ``pipemax annotate`` is written here.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

_ARGUMENTS, _OPTIONS = "Arguments", "Options"
_Function = TypeVar("_Function", bound=Callable[..., Any])
_BELOW = " " * 6
_COMMANDS_WIDTH = 18
_TYPE = re.compile(r"<(?:list\[)?(\w+)\]?(?: range)?>")
"""A type as typer names it, such as ``<int range>`` and ``<list[str]>``: the bounds stand in the help too."""


class PlainCommand(TyperCommand):
    """A command whose help is plain text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to the formatter, which knows the width."""
        _write_help(self, ctx, formatter)


class PlainGroup(TyperGroup):
    """A group of commands whose help is plain text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to the formatter, which knows the width."""
        _write_help(self, ctx, formatter)


class PlainTyper(typer.Typer):
    """An application with plain help for each command."""

    def __init__(
        self, *, cls: type[TyperGroup] = PlainGroup, add_completion: bool = False, **rest: Any
    ) -> None:
        """Take the arguments of ``typer.Typer``.

        Only the group of all commands installs completion: a shell completes ``pipemax``, not ``pipemax annotate``.
        """
        super().__init__(
            cls=cls,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            add_completion=add_completion,
            **rest,
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **rest: Any
    ) -> Callable[[_Function], _Function]:
        """Declare a command as ``typer.Typer.command`` does."""
        return super().command(name, cls=cls or PlainCommand, **rest)


def _write_help(command: Any, ctx: Any, formatter: Any) -> None:
    formatter.write(command.get_usage(ctx) + "\n")
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        is_example = paragraph.startswith("  ")  # with the line breaks that a shell needs
        text = paragraph if is_example else "\n".join(_wrapped(paragraph, formatter.width))
        formatter.write(f"\n{text}\n")
    options = _option_sections(command, ctx, formatter.width)
    # What has no panel is the least that a user looks for.
    unnamed = options.pop(_OPTIONS, [])
    sections = options | _command_sections(command, ctx, formatter.width)
    sections["Other options" if options.keys() - {_ARGUMENTS} else _OPTIONS] = unnamed
    for name, entries in sections.items():
        formatter.write(f"\n{name}:\n" + "\n".join(entries) + "\n")


def _option_sections(command: Any, ctx: Any, width: int) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            unnamed = _ARGUMENTS if isinstance(parameter, TyperArgument) else _OPTIONS
            entries = sections.setdefault(getattr(parameter, "rich_help_panel", None) or unnamed, [])
            entries += ["  " + _TYPE.sub(r"<\1>", record[0]), *_wrapped(record[1], width, indent=_BELOW)]
    return sections


def _command_sections(command: Any, ctx: Any, width: int) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for name in command.list_commands(ctx) if isinstance(command, TyperGroup) else ():
        listed: Any = command.get_command(ctx, name)
        if listed is not None and not listed.hidden:
            sections.setdefault(listed.rich_help_panel or "Commands", []).append(
                _command_entry(name, listed.help or "", width)
            )
    return sections


def _command_entry(name: str, text: str, width: int) -> str:
    first_paragraph = inspect.cleandoc(text).split("\n\n")[0]
    lines = _wrapped(first_paragraph, width, indent=" " * _COMMANDS_WIDTH)
    return f"  {name}".ljust(_COMMANDS_WIDTH) + "\n".join(lines).lstrip()


def _wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
