"""Print what a job says while it runs: lines of a report on standard output, and one line of progress."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

log = logging.getLogger(__name__)

_TERMINAL_PERIOD_S, _LINE_PERIOD_S = 1.0, 9.0
_LABEL_WIDTH = 9


class Terminal:
    """The console of a person or of a log. Thread-safe, as rich's is."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, label: str, text: str) -> None:
        """Print one fact under its label; never wrap it, because people copy the paths."""
        self.console.print(f"{label:<{_LABEL_WIDTH}}{text}", markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        log.warning("%s", text)
        self.console.print(f"  Warning: {text}", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress_line(self) -> Iterator[tuple[Callable[[str], None], float]]:
        """Yield the function that shows the line, and every how many seconds to call it.

        On a terminal the line changes in place; elsewhere each call prints a new line.
        """
        if not self.console.is_terminal:
            yield lambda line: self.say("", line), _LINE_PERIOD_S
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as live:
            yield lambda line: live.update(Text(f"  {line}"), refresh=True), _TERMINAL_PERIOD_S
