"""What the server's tests share: request batches, a stand-in for the executor's JVM, a look at the server."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import flight

from pipemax.wire import (
    REQUEST_SCHEMA,
    GenerationSpec,
    ProcessIdentity,
    ServerAction,
    ServerStats,
)
from pipemax_spark.executor.client import EngineOptions, complete
from pipemax_spark.executor.server_process import ServerFiles, connect, find_executor, server_files
from tests.fakes.settings import expected_text, fake_config

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
SILENCE_S = 4.0
"""A short silence timeout that busy cores do not reach: a server says something every second."""


def request_batch(prompts: Sequence[str | None], first_id: int = 0, **columns: list[Any]) -> pa.RecordBatch:
    """A REQUEST_SCHEMA batch with row ids from ``first_id`` on; ``columns`` for messages and overrides."""
    rows = len(prompts)
    values = {
        "row_id": list(range(first_id, first_id + rows)),
        "prompt": list(prompts),
        "messages": columns.get("messages", [None] * rows),
        "images": columns.get("images", [None] * rows),
        "overrides": columns.get("overrides", [None] * rows),
        "question": columns.get("question", [None] * rows),
        "fault": columns.get("fault", [None] * rows),
    }
    return pa.RecordBatch.from_pydict(values, schema=REQUEST_SCHEMA)


def request_batches(
    rows: int, batch_rows: int, prompt: Callable[[int], str] = "prompt {}".format
) -> Iterator[pa.RecordBatch]:
    for first in range(0, rows, batch_rows):
        yield request_batch([prompt(row) for row in range(first, min(rows, first + batch_rows))], first)


def options(engine_python: str, *, generation: GenerationSpec | None = None, **changes: Any) -> EngineOptions:
    """Options for the fake engine; names that are fields of neither side go to the fake."""
    fields = EngineOptions.__dataclass_fields__
    ours = {name: value for name, value in changes.items() if name in fields}
    ours.setdefault("engine", fake_config(**{n: v for n, v in changes.items() if n not in fields}))
    ours.setdefault("job_id", "job")
    return EngineOptions(generation=generation or GenerationSpec(), engine_python=engine_python, **ours)


def run_prompts(
    prompts: Sequence[str | None], opts: EngineOptions, **columns: list[Any]
) -> list[dict[str, Any]]:
    """Completions as dicts, in the order of the prompts; fails unless each row comes exactly once."""
    batches = list(complete([request_batch(prompts, **columns)], opts, task="task"))
    rows = sorted((row for batch in batches for row in batch.to_pylist()), key=lambda row: row["row_id"])
    assert [row["row_id"] for row in rows] == list(range(len(prompts)))
    return rows


def at_once(work: Callable[[_Argument], _Result], arguments: Sequence[_Argument]) -> list[_Result]:
    """What the work makes of each argument, each on a thread of its own at the same time."""
    with ThreadPoolExecutor(len(arguments)) as threads:
        return list(threads.map(work, arguments))


def assert_exactly_once(batches: Sequence[pa.RecordBatch], rows: int) -> None:
    """Each of the ``request_batches`` rows is there once, with the text of its own prompt."""
    texts = [(row["row_id"], row["text"]) for batch in batches for row in batch.to_pylist()]
    assert sorted(texts) == [(row, expected_text(f"prompt {row}")) for row in range(rows)]


def files_of(opts: EngineOptions) -> ServerFiles:
    """Where the server of this test's executor lives."""
    return server_files(find_executor(), opts.engine_python, opts.log_dir)


def server_of(opts: EngineOptions) -> ProcessIdentity:
    identity = files_of(opts).recorded()
    assert identity is not None, "no server has started"
    return identity


def server_stats(opts: EngineOptions) -> ServerStats:
    with connect(files_of(opts)) as client:
        options = flight.FlightCallOptions(timeout=5)
        (answer,) = client.do_action(flight.Action(ServerAction.STATS, b""), options)
        return ServerStats.from_bytes(answer.body.to_pybytes())


def shut_down(opts: EngineOptions) -> None:
    with connect(files_of(opts)) as client:
        list(client.do_action(flight.Action(ServerAction.SHUTDOWN, b""), flight.FlightCallOptions(timeout=5)))


class FakeJvm:
    """A process whose life bounds the servers', as an executor's JVM does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "3600"])
        self.pid = self._process.pid
        self.identity = ProcessIdentity.of(self.pid)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def servers(self) -> list[ProcessIdentity]:
        """The servers that run for it, by their command lines."""
        flag = f"\0--watch-jvm\0{self.pid}:".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if flag in path.read_bytes():
                    found.append(ProcessIdentity.of(int(path.parent.name)))
        return found
