"""Fed by memory through Spark: phases, answers and memory as if the table's rows had all been there at once.

Tasks, partitions and chunks are Spark's and the job's own, the server and the controller real; the clock is virtual.
"""

from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.spark.slots import slots_of
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

pytestmark = pytest.mark.all_lanes

_ROWS, _MAX_TOKENS = 1_800, 40
_POOLS: dict[str, Any] = {"gpu_blocks": 600, "host_blocks": 1_100, "input_grace_s": 60.0}
_HOST_ROWS = 116
"""Requests of mean length that fit into the host pool: a fifteenth of the table."""
_LARGE_HOST_BLOCKS = 13_000
"""Some 1,370 requests."""
_CHUNK_ROWS = 16
_LOAD_S = 4.0
"""As with real models, the first task's neighbours have come by the time the engine runs."""
_SPARKS_OWN_GAPS = 2
"""On a slow machine this fast engine may be done with a chunk before Spark has begun the next. Were it every partition
that ends a phase, there would be eight or more."""


def metrics_of_run(run: Jobs, directory: Path, pools: dict[str, Any]) -> dict[str, float]:
    """The engine's last ones, after a run with chunks as small as feeding lets them be."""
    run.write_input([(i, f"row {i}") for i in range(_ROWS)])
    summary = run.run(
        id_columns=("id",),
        engine=virtual_config(load_s=_LOAD_S, **pools),
        generation=GenerationSpec(max_tokens=_MAX_TOKENS),
        engine_python=write_engine_python(directory / "python", f"--chunk-rows={_CHUNK_ROWS}"),
        commit_every=timedelta(seconds=0.1),
    )
    assert summary.rows_out == _ROWS
    (path,) = (run.directory / "runs").rglob("engine_metrics.parquet")
    return dict(pq.read_table(path).to_pylist()[-1]["metrics"])


@pytest.mark.long  # speed; tests/serve/test_feeding shows it of the server
def test_no_partitions_and_no_chunks_end_ends_a_prefill_phase(run: Jobs, tmp_path: Path) -> None:
    metrics = metrics_of_run(run, tmp_path, _POOLS)
    assert committed_chunks(run.output) >= 2
    prompts = [f"Say row {i}" for i in range(_ROWS)]
    texts = {row["id"]: row["annotation"]["text"] for row in run.rows()}
    assert texts == dict(enumerate(map(virtual_text, prompts)))
    starved = sum(switches(metrics, "starved")[:-1])
    assert starved <= _SPARKS_OWN_GAPS, starved
    reference = phases_with_all_rows_there(prompts, max_tokens=_MAX_TOKENS, controller=_POOLS)
    own, expected = refills(metrics), refills(reference)
    # Where rows came a little late, one phase took in those of several.
    assert len(own) == pytest.approx(len(expected), rel=0.15), (own, expected)
    assert median(own) == pytest.approx(median(expected), rel=0.15)
    assert metrics["most_held"] <= 2 * _HOST_ROWS + 4 * _CHUNK_ROWS


@pytest.mark.long
def test_the_first_phase_fills_a_host_pool_that_is_larger_than_a_first_chunk_would_be(
    run: Jobs, tmp_path: Path
) -> None:
    """Cut without regard to the pool, it would have 256 rows a slot."""
    metrics = metrics_of_run(run, tmp_path, _POOLS | {"host_blocks": _LARGE_HOST_BLOCKS})
    assert switches(metrics, "started")[0] > 256 * slots_of(run.spark).total
    assert not switches(metrics, "starved")[0]
