"""Draw a run's charts in a separate process: matplotlib takes a hundred MiB, which the driver may lack."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pyarrow as pa

from pipemax_spark.errors import JobError
from pipemax_spark.report.engine_tracks import EngineTrack

_TIMEOUT_S = 300.0


def draw_plot(by_server: Mapping[str, EngineTrack], path: Path) -> dict[str, str]:
    """Write the plot of the servers' tracks as PNG, and return each chart as SVG text by name.

    Raise ``JobError`` that says why there is none.
    """
    with tempfile.TemporaryDirectory() as drawings:
        _draw(by_server, path, Path(drawings))
        return {file.stem: file.read_text(encoding="utf-8") for file in sorted(Path(drawings).glob("*.svg"))}


def _draw(by_server: Mapping[str, EngineTrack], path: Path, drawings: Path) -> None:
    arguments = [sys.executable, "-m", "pipemax_spark.report.plot", str(path), str(drawings)]
    # A package that came with --py-files is found only by this process's path.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        with (
            tempfile.TemporaryFile("w+", errors="replace") as errors,
            subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=environment
            ) as process,
        ):
            try:
                with contextlib.suppress(BrokenPipeError):  # its errors say why it has ended
                    _send(by_server, process.stdin)
                code = process.wait(_TIMEOUT_S)
            finally:
                process.kill()
            errors.seek(0)
            said = errors.read().strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"no plot was drawn: {error}") from None
    if code != 0:
        raise JobError(f"no plot was drawn: {said[-1] if said else f'its process ended with {code}'}")


def _send(by_server: Mapping[str, EngineTrack], pipe: IO[bytes] | None) -> None:
    """Write an Arrow stream of each track, one after another, and close the pipe."""
    assert pipe is not None
    with pipe:
        for server_id, track in by_server.items():
            table = track.to_arrow(server_id)
            with pa.ipc.new_stream(pipe, table.schema) as writer:
                writer.write_table(table)
