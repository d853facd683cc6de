"""Fed by memory through Spark: phases, answers and memory as if the table's rows had all been there at once.

Tasks, partitions and chunks are Spark's and the job's own, the server and the controller real; the clock is virtual.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipemax.wire import GenerationSpec
from tests.fakes.engine_python import write_engine_python
from tests.fakes.virtual_engine import (
    phases_with_all_rows_there,
    refills,
    switches,
    virtual_config,
    virtual_text,
)
from tests.spark.conftest import Jobs
from tests.spark.test_killed_job import committed_chunks

_ROWS, _MAX_TOKENS = 1_800, 40
_POOLS: dict[str, Any] = {"gpu_blocks": 600, "host_blocks": 1_800, "input_grace_s": 60.0}
_HOST_ROWS = 190
"""Requests of mean length that fit into the host pool: a ninth of the table."""
_CHUNK_ROWS = 16


def test_no_partitions_and_no_chunks_end_ends_a_prefill_phase(
    jobs: Callable[[], Jobs], tmp_path: Path
) -> None:
    run = jobs()
    run.write_input([(i, f"row {i}") for i in range(_ROWS)])
    summary = run.run(
        id_columns=("id",),
        engine=virtual_config(**_POOLS),
        generation=GenerationSpec(max_tokens=_MAX_TOKENS),
        engine_python=write_engine_python(tmp_path / "python", f"--chunk-rows={_CHUNK_ROWS}"),
        commit_every_s=0.1,  # chunks as small as feeding lets them be
    )
    assert summary is not None
    assert summary.rows_out == _ROWS
    assert committed_chunks(run.output) >= 2
    prompts = [f"Say row {i}" for i in range(_ROWS)]
    texts = {row["id"]: row["annotation"]["text"] for row in run.rows()}
    assert texts == dict(enumerate(map(virtual_text, prompts)))
    (path,) = (run.directory / "runs").rglob("engine_metrics.parquet")
    metrics = dict(pq.read_table(path).to_pylist()[-1]["metrics"])
    assert not any(switches(metrics, "starved")[:-1])
    reference = phases_with_all_rows_there(prompts, max_tokens=_MAX_TOKENS, controller=_POOLS)
    own, expected = refills(metrics), refills(reference)
    assert abs(len(own) - len(expected)) <= 2, (own, expected)
    assert mean(own) == pytest.approx(mean(expected), rel=0.05)
    assert metrics["most_held"] <= 2 * _HOST_ROWS + 4 * _CHUNK_ROWS
