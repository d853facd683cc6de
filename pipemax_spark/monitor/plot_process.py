"""Draw a run's plot in a process of its own: matplotlib takes a hundred MiB, which the driver may not have to spare."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from pipemax_spark.errors import JobError
from pipemax_spark.monitor.engine_tracks import EngineTrack

_TIMEOUT_S = 300.0


def draw_plot(by_server: Mapping[str, EngineTrack], path: Path) -> None:
    """Write the plot of the servers' tracks as PNG. Raise ``JobError`` that says why there is none."""
    arguments = [sys.executable, "-m", "pipemax_spark.monitor.plot", str(path)]
    # A package that came with --py-files is found only by this process's path.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        subprocess.run(
            arguments,
            input=_to_bytes(by_server),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise JobError(f"no plot was drawn: {lines[-1] if lines else error}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"no plot was drawn: {error}") from None


def _to_bytes(by_server: Mapping[str, EngineTrack]) -> bytes:
    """Return one Arrow stream for each track, one after another."""
    sink = pa.BufferOutputStream()
    for server_id, track in by_server.items():
        table = track.to_arrow(server_id)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]  # pyarrow is untyped
