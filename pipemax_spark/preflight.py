"""Asks the engine's own environment, on an executor, whether engine and generation are fine: no engine starts."""

import subprocess
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pipemax.wire import PreflightReply, PreflightRequest
from pipemax_spark.client import engine_command, engine_environment
from pipemax_spark.errors import JobError

_TIMEOUT_S = 600


def run_preflight(spark: Any, request: PreflightRequest, *, engine_python: str | None) -> PreflightReply:
    """``JobError`` with the engine side's own sentence where something is wrong."""

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            replies = [_ask(engine_python, payload) for payload in batch.column(0).to_pylist()]
            yield pa.RecordBatch.from_arrays([pa.array(replies, pa.binary())], names=["reply"])

    row = spark.createDataFrame([(bytearray(request.to_bytes()),)], "request binary").coalesce(1)
    reply = PreflightReply.from_bytes(bytes(row.mapInArrow(ask, "reply binary").head()["reply"]))
    if reply.error:
        raise JobError(reply.error)
    return reply


def _ask(engine_python: str | None, payload: bytes) -> bytes:
    command = engine_command(engine_python, "pipemax", "preflight")
    try:
        done = subprocess.run(
            command,
            input=payload,
            capture_output=True,
            env=engine_environment(),
            cwd="/",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return PreflightReply(
            error=f"engine-python {command[0]!r} cannot be run on an executor: {error}"
        ).to_bytes()
    if done.returncode != 0 or not done.stdout.strip():
        last_lines = " | ".join(done.stderr.decode(errors="replace").strip().splitlines()[-3:])
        return PreflightReply(
            error=f"engine-python {command[0]!r} could not check the engine (exit {done.returncode}): {last_lines}. "
            "Is pipemax-spark with its engine extra installed there?"
        ).to_bytes()
    return done.stdout.strip().splitlines()[-1]
