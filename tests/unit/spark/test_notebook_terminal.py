"""What a job's terminal writes into a notebook's cell, by a real kernel."""

from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

PROGRAM = """
import threading
from pipemax_spark.report.terminal import Terminal
terminal = Terminal.standard()
terminal.say("Input", "3 rows")
with terminal.progress_line() as (show, period_s):
    thread = threading.Thread(target=lambda: [show(f"{done} of 3 rows") for done in range(4)])
    thread.start()
    thread.join()
"""


@pytest.fixture
def kernel() -> Iterator[Any]:
    manager, client = start_new_kernel(startup_timeout=120)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def messages(kernel: Any, program: str) -> list[dict[str, Any]]:
    """What the kernel sends to the front end for this cell."""
    sent: list[dict[str, Any]] = []
    reply = kernel.execute_interactive(program, timeout=120, output_hook=sent.append)
    assert reply["content"]["status"] == "ok", reply["content"]
    return sent


def printed(sent: list[dict[str, Any]]) -> str:
    return "".join(message["content"]["text"] for message in sent if message["msg_type"] == "stream")


def test_in_a_notebook_the_line_of_progress_changes_in_place(kernel: Any) -> None:
    sent = messages(kernel, PROGRAM)
    assert printed(sent) == "Input    3 rows\n", "plain text, without a terminal's control characters"
    lines = [
        (message["msg_type"], message["content"]["data"]["text/plain"].strip())
        for message in sent
        if message["msg_type"] in ("display_data", "update_display_data")
    ]
    updates = ["0 of 3 rows", "1 of 3 rows", "2 of 3 rows", "3 of 3 rows", ""]
    assert lines == [("display_data", ""), *(("update_display_data", text) for text in updates)]


def test_in_a_databricks_notebook_each_line_of_progress_is_a_new_one(kernel: Any) -> None:
    databricks = "import os; os.environ['DATABRICKS_RUNTIME_VERSION'] = '17.3'"
    sent = messages(kernel, databricks + PROGRAM)
    assert {message["msg_type"] for message in sent} <= {"stream", "status", "execute_input"}
    assert printed(sent).split("\n")[1:-1] == [f"{'':<9}{done} of 3 rows" for done in range(4)]
