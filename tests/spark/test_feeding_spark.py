"""Fed by memory through Spark: a table several times the host pool, its tasks and partitions, and the real server."""

from collections.abc import Callable

import pyarrow.parquet as pq

from pipemax.wire import GenerationSpec
from tests.fakes.virtual_engine import virtual_config, virtual_text
from tests.spark.conftest import Jobs

_ROWS, _HOST_ROWS = 900, 190


def test_no_partitions_end_ends_a_prefill_phase(jobs: Callable[[], Jobs]) -> None:
    run = jobs()
    run.write_input([(i, f"row {i}") for i in range(_ROWS)])
    engine = virtual_config(gpu_blocks=600, host_blocks=1_800, input_grace_s=60.0)
    summary = run.run(id_columns=("id",), engine=engine, generation=GenerationSpec(max_tokens=40))
    assert summary is not None
    assert summary.rows_out == _ROWS
    texts = {row["id"]: row["annotation"]["text"] for row in run.rows()}
    assert texts == {i: virtual_text(f"Say row {i}") for i in range(_ROWS)}
    (path,) = (run.directory / "runs").rglob("engine_metrics.parquet")
    metrics = dict(pq.read_table(path).to_pylist()[-1]["metrics"])
    starved = [metrics[f"switch_{i}_starved"] for i in range(int(metrics["switches"]))]
    assert len(starved) >= 4
    assert not any(starved[:-1])
    assert metrics["most_held"] <= 2 * _HOST_ROWS + 8 * 64
