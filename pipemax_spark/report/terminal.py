"""Print what a job says while it runs: lines of a report on standard output, and one line of progress.

In a notebook the lines are plain text. Depending on environment variables that kernels set, rich would treat a notebook
as a terminal or write HTML; a terminal's control characters would litter the cell.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipemax_spark.report.lossy_stream import lossy

log = logging.getLogger(__name__)

_IN_PLACE_PERIOD_S, _LINE_PERIOD_S, _NOTEBOOK_LINE_PERIOD_S = 1.0, 9.0, 30.0
_LABEL_WIDTH = 9
_LOG_WIDTH, _NOTEBOOK_WIDTH = 160, 100
"""Width of the report in columns if there is no terminal with its own width."""


class Terminal:
    """The console of a person, a notebook or a log. Thread-safe, as rich's is."""

    def __init__(self, console: Console, *, is_notebook: bool = False) -> None:
        self.console = console
        self._is_notebook = is_notebook

    @classmethod
    def standard(cls) -> Self:
        """Return the terminal, the notebook's cell or the log that standard output is."""
        is_notebook = _notebook_shell() is not None
        console = Console(
            file=lossy("stdout"),
            soft_wrap=True,
            highlight=False,
            force_jupyter=False,
            force_terminal=False if is_notebook else None,
        )
        if not console.is_terminal:
            console.width = _NOTEBOOK_WIDTH if is_notebook else _LOG_WIDTH
        return cls(console, is_notebook=is_notebook)

    def say(self, label: str, text: str) -> None:
        """Print one fact under its label; never wrap it, because people copy the paths."""
        self.console.print(f"{label:<{_LABEL_WIDTH}}{text}", markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        log.warning("%s", text)
        self.console.print(f"  Warning: {text}", markup=False, highlight=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Print an error."""
        style = "bold red" if self.console.is_terminal else None
        self.console.print(f"Error: {text}", style=style, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Show on a terminal what is being done while the context lasts; elsewhere the next line says what was done.

        Not around ``progress_line``: a console has one line that changes.
        """
        if self._is_notebook or not self.console.is_terminal:
            yield
            return
        with self.console.status(what):
            yield

    @contextmanager
    def progress_line(self) -> Iterator[tuple[Callable[[str], None], float]]:
        """Yield the function that shows the line, and the number of seconds between its calls.

        On a terminal and in a notebook the line changes in place; elsewhere each call prints a new line. So does a
        Databricks notebook, because it is not known whether it can change output in place.
        """
        if self._is_notebook and "DATABRICKS_RUNTIME_VERSION" not in os.environ:
            with _cell_line() as show:
                yield show, _IN_PLACE_PERIOD_S
        elif self.console.is_terminal:
            with Live(console=self.console, transient=True, auto_refresh=False) as live:
                yield lambda line: live.update(Text(f"  {line}"), refresh=True), _IN_PLACE_PERIOD_S
        else:
            period_s = _NOTEBOOK_LINE_PERIOD_S if self._is_notebook else _LINE_PERIOD_S
            yield lambda line: self.say("", line), period_s


@contextmanager
def _cell_line() -> Iterator[Callable[[str], None]]:
    """Yield the function that shows a line in the cell that runs now, in place of the line before."""
    from IPython.display import display

    def content(line: str) -> dict[str, str]:
        return {"text/plain": f"  {line}"}

    shown = display(content(""), raw=True, display_id=True)
    try:
        yield lambda line: shown.update(content(line), raw=True)
    finally:
        shown.update(content(""), raw=True)


def _notebook_shell() -> Any:
    """Return IPython's shell if this process is a notebook's kernel, or else None."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None
