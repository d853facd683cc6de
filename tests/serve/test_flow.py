"""Flow control end to end: bounded read-ahead, slow consumers, chained calls, cancellation."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pipemax_spark.executor.client import EngineOptions, complete
from tests.fakes.settings import expected_text, fake_config
from tests.serve.support import (
    assert_exactly_once,
    options,
    request_batch,
    request_batches,
    run_prompts,
    server_stats,
)
from tests.waiting import wait_until

EnginePython = Callable[..., str]
_REPOSITORY = Path(__file__).resolve().parents[2]
_CHUNK = 64
_WINDOW = 24  # pacing.FLOOR_FACTOR times the fake's max_num_seqs


class CountedBatches:
    """Request batches that know how many of their rows were pulled."""

    def __init__(self, rows: int, batch_rows: int) -> None:
        self.pulled = 0
        self._batches = request_batches(rows, batch_rows)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.pulled += batch.num_rows
            yield batch


def test_no_more_is_read_than_the_window_and_one_batch(shared_engine_python: str) -> None:
    requests = CountedBatches(100_000, 50)
    results = complete(requests, options(shared_engine_python), task="task")
    taken = next(results).num_rows
    time.sleep(0.5)  # a slow consumer: nothing must be read meanwhile beyond the credit that it has
    for _ in range(30):
        assert requests.pulled - taken <= _WINDOW + 2 * _CHUNK + 50
        taken += next(results).num_rows
    results.close()
    time.sleep(0.1)
    assert requests.pulled - taken <= _WINDOW + 2 * _CHUNK + 50


def test_rows_of_a_slow_engine_are_sent_several_to_a_message(shared_engine_python: str) -> None:
    """Each message is work for the task, and for Spark's JVM."""
    opts = options(shared_engine_python, tokens_per_s=600)  # 150 rows/s
    batches = list(complete(request_batches(300, 50), opts, task="task"))
    assert_exactly_once(batches, 300)
    assert len(batches) < 300 / 4


def test_rows_larger_than_a_chunk_of_bytes_pass(fake_engine_python: EnginePython) -> None:
    engine_python = fake_engine_python("--chunk-bytes=1000", "--max-bytes=4000")
    prompts = ["word" * 2_000 if row % 3 else "short" for row in range(40)]
    rows = run_prompts(prompts, options(engine_python))
    assert [row["text"] for row in rows] == [expected_text(prompt) for prompt in prompts]


@pytest.mark.parametrize("batch_rows", [1, 700])
def test_chained_calls_share_an_engine_without_deadlock(
    fake_engine_python: EnginePython, batch_rows: int
) -> None:
    opts = options(fake_engine_python("--undelivered-rows=64"), max_num_seqs=8)
    inner = complete(request_batches(1_400, batch_rows), opts, task="task")
    again = (
        request_batch(["prompt " + text.split()[-1] for text in batch["text"].to_pylist()], first)
        for batch, first in _with_first_row(inner)
    )
    outer = list(complete(again, opts, task="task"))
    assert sorted(text for batch in outer for text in batch["text"].to_pylist()) == sorted(
        expected_text(f"prompt {row}") for row in range(1_400)
    )


def test_chained_calls_in_many_threads_share_a_window_of_one_row(fake_engine_python: EnginePython) -> None:
    opts = options(
        fake_engine_python("--undelivered-rows=4", "--chunk-rows=2", "--max-rows=1"),
        max_num_seqs=1,
        window_s=0.002,
    )
    done: list[int] = []

    def chain() -> None:
        inner = complete(request_batches(60, 7), opts, task="task")
        again = (request_batch(batch["text"].to_pylist(), first) for batch, first in _with_first_row(inner))
        done.append(sum(batch.num_rows for batch in complete(again, opts, task="task")))

    threads = [threading.Thread(target=chain, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [60, 60, 60]


def test_an_abandoned_session_is_aborted_at_once(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python())
    prompts = ["quick", *["[[slow 600]] never"] * 30]
    results = complete([request_batch(prompts)], opts, task="task")
    next(results)
    results.close()
    wait_until(lambda: _counts(opts)["aborted"] == 30, what="the rows are aborted")


def test_the_rows_of_a_killed_client_are_aborted(fake_engine_python: EnginePython) -> None:
    opts = options(fake_engine_python())
    run_prompts(["quick"], opts)
    script = "from tests.serve.support import *; run_prompts(['[[slow 600]]'] * 30, options(sys.argv[1]))"
    assert opts.engine_python is not None
    client = subprocess.Popen(
        [sys.executable, "-c", f"import sys; {script}", opts.engine_python], cwd=_REPOSITORY
    )
    wait_until(lambda: server_stats(opts).running_requests == 30, what="its rows run")
    client.kill()
    client.wait()
    wait_until(lambda: _counts(opts)["aborted"] == 30, what="its rows are aborted")


@pytest.mark.parametrize("sent", [["[[slow 600]] never"], []])
def test_an_error_of_the_input_reaches_the_consumer(shared_engine_python: str, sent: list[str]) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from map(request_batch, [[prompt] for prompt in sent])
        raise OSError("the disk is gone")

    before = threading.active_count()
    with pytest.raises(OSError, match="the disk is gone"):
        list(complete(failing(), options(shared_engine_python), task="task"))
    assert threading.active_count() == before


@pytest.mark.parametrize("ids", [(0, 0), (0, 1)])
def test_duplicate_row_ids_and_foreign_schemas_are_refused(
    shared_engine_python: str, ids: tuple[int, int]
) -> None:
    double = [request_batch(["[[slow 60]]"], ids[0]), request_batch(["b"], ids[1])]
    if ids[0] != ids[1]:
        double[1] = double[1].rename_columns(["id", *double[1].schema.names[1:]])
    with pytest.raises(ValueError, match=r"row ids are not unique|expected batches of"):
        list(complete(double, options(shared_engine_python), task="task"))


@pytest.mark.long  # very many rows
def test_queues_stay_bounded_over_many_rows(shared_engine_python: str) -> None:
    opts = options(shared_engine_python, engine=fake_config(max_num_seqs=1_000), job_id="queues")
    requests = CountedBatches(200_000, 10_000)
    most_ahead = taken = 0
    for batch in complete(requests, opts, task="task"):
        taken += batch.num_rows
        most_ahead = max(most_ahead, requests.pulled - taken)
    assert taken == 200_000
    window = 1_500 + 16 * _CHUNK
    # Pulled and not taken: in the window, finished and not delivered, in gRPC's buffers, and one Arrow batch.
    assert most_ahead <= window + 4_096 + 2_000 + 10_000
    assert server_stats(opts).engine_metrics["most_in_flight"] <= window
    assert server_stats(opts).jobs["queues"].rows_done == 200_000


def _counts(opts: EngineOptions) -> dict[str, float]:
    (row,) = run_prompts(["[[counts]]"], opts)
    return dict(json.loads(row["text"].strip()))


def _with_first_row(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, int]]:
    first = 0
    for batch in batches:
        yield batch, first
        first += batch.num_rows
