"""What a job says at a terminal and in a log."""

from io import StringIO

import pytest
from rich.console import Console

from pipemax_spark.report.terminal import Terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_being_done_shows_on_a_terminal_until_it_is_done(is_terminal: bool) -> None:
    printed = StringIO()
    terminal = Terminal(Console(file=printed, force_terminal=is_terminal, width=80))
    with terminal.doing("starting Spark"):
        terminal.say("Input", "3 rows")
    assert ("starting Spark" in printed.getvalue()) == is_terminal
    if not is_terminal:
        assert printed.getvalue() == "Input    3 rows\n"
    with terminal.progress_line() as (show, _):
        show("1 of 3 rows")
    assert "1 of 3 rows" in printed.getvalue()
