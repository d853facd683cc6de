"""Fed by memory: how rows come, in which batches and streams, changes neither phases nor answers nor memory.

The real controller on a virtual clock decides, behind the real server and client.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean

import pyarrow as pa
import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.executor.client import EngineOptions, complete
from tests.fakes.virtual_engine import (
    phases_with_all_rows_there,
    refills,
    switches,
    virtual_config,
    virtual_text,
)
from tests.serve.support import at_once, options, request_batches, server_stats

_ROWS, _MAX_TOKENS = 1_100, 40
_POOLS = {"gpu_blocks": 600, "host_blocks": 1_800, "input_grace_s": 60.0}
_HOST_ROWS = 190
"""Requests of mean length that fit into the host pool: a sixth of the table."""


@dataclass
class Run:
    """What came out of feeding the table in one way."""

    texts: dict[str, str] = field(default_factory=dict)
    pulled: int = 0
    most_ahead: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def feed(opts: EngineOptions, *, batch_rows: int, streams: int) -> Run:
    """The table's rows, evenly over streams that run side by side."""
    run, lock = Run(), threading.Lock()

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with lock:
                run.pulled += batch.num_rows
                run.most_ahead = max(run.most_ahead, run.pulled - len(run.texts))
            yield batch

    def stream(number: int) -> None:
        prompts = [f"row {row}" for row in range(number, _ROWS, streams)]
        batches = request_batches(len(prompts), batch_rows, prompts.__getitem__)
        for batch in complete(counted(batches), opts, task=f"stream {number}"):
            with lock:
                run.texts.update((prompts[row["row_id"]], row["text"]) for row in batch.to_pylist())

    at_once(stream, range(streams))
    run.metrics = server_stats(opts).engine_metrics
    return run


@pytest.fixture(scope="module")
def reference() -> dict[str, float]:
    prompts = [f"row {row}" for row in range(_ROWS)]
    return phases_with_all_rows_there(prompts, max_tokens=_MAX_TOKENS, controller=_POOLS)


@pytest.mark.parametrize(
    ("batch_rows", "streams"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(1, 7, marks=pytest.mark.long),
        pytest.param(64, 2, marks=pytest.mark.long),
        pytest.param(10_000, 1, marks=pytest.mark.long),
        (10_000, 7),
    ],
)
def test_phases_answers_and_memory_do_not_depend_on_how_rows_arrive(
    fake_engine_python: Callable[..., str], reference: dict[str, float], batch_rows: int, streams: int
) -> None:
    opts = options(
        fake_engine_python("--chunk-rows=16"),
        engine=virtual_config(**_POOLS),
        generation=GenerationSpec(max_tokens=_MAX_TOKENS),
    )
    run = feed(opts, batch_rows=batch_rows, streams=streams)
    assert run.texts == {f"row {row}": virtual_text(f"row {row}") for row in range(_ROWS)}
    # Never for want of input, but where the table ends; and as often as if all rows had been there.
    assert not any(switches(run.metrics, "starved")[:-1])
    own, expected = refills(run.metrics), refills(reference)
    assert abs(len(own) - len(expected)) <= 2, (own, expected)
    assert mean(own) == pytest.approx(mean(expected), rel=0.05)
    # Memory: what fits into the host pool, what waits for the next phase, a chunk a stream, and an Arrow batch each.
    assert run.metrics["most_held"] <= 2 * _HOST_ROWS + 16 * streams
    assert run.most_ahead <= 2 * _HOST_ROWS + (32 + min(batch_rows, _ROWS // streams + 1)) * streams
