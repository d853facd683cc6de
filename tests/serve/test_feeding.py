"""Fed by memory: how rows come, in which batches and streams, changes neither phases nor answers nor memory.

The real controller on a virtual clock decides, behind the real server and client.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pyarrow as pa
import pytest

from pipemax.domain.events import InputEnded, InputOpened
from pipemax.wire import GenerationSpec
from pipemax_spark.client import EngineOptions, complete
from tests.fakes.virtual_engine import SwitchRecorder, lengths_of, virtual_config, virtual_text
from tests.serve.support import options, request_batches, server_stats
from tests.unit.control.fake_engine import FakeEngine, small_config, spec

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

    def refills(self) -> list[float]:
        """Requests that each prefill phase has taken in, without the first two, where lengths are still unknown,
        and the last, which ends with the table."""
        started = self.switches("started")
        return [after - before for before, after in pairwise(started)][1:-1]

    def mean_refill(self) -> float:
        return sum(self.refills()) / len(self.refills())

    def switches(self, what: str) -> list[float]:
        return [self.metrics[f"switch_{i}_{what}"] for i in range(int(self.metrics["switches"]))]


def feed(opts: EngineOptions, *, batch_rows: int, streams: int) -> Run:
    """The table's rows, evenly over streams that run side by side."""
    run, lock = Run(), threading.Lock()
    failures: list[BaseException] = []

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with lock:
                run.pulled += batch.num_rows
                run.most_ahead = max(run.most_ahead, run.pulled - len(run.texts))
            yield batch

    def stream(number: int) -> None:
        prompts = [f"row {row}" for row in range(number, _ROWS, streams)]
        batches = request_batches(len(prompts), batch_rows, prompts.__getitem__)
        try:
            for batch in complete(counted(batches), opts, task=f"stream {number}"):
                with lock:
                    run.texts.update((prompts[row["row_id"]], row["text"]) for row in batch.to_pylist())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    run.metrics = server_stats(opts).engine_metrics
    return run


@pytest.fixture(scope="module")
def reference() -> Run:
    """All rows there from the start: what the phases would be if input were no matter."""
    engine = FakeEngine(config=small_config(**_POOLS), checks_integrity=False, checks_each_run=False)
    for row in range(_ROWS):
        prompt_tokens, outputs = lengths_of(f"row {row}")
        engine.admit(spec(f"row {row}", prompt_tokens, max_tokens=_MAX_TOKENS), outputs)
    engine.controller.apply([InputOpened()])
    recorder, started = SwitchRecorder(), set[str]()
    while engine.sequences:
        recorder.observe(engine.step(), started, len(engine.finished))
        if len(started) == _ROWS:
            engine.controller.apply([InputEnded()])
    return Run(metrics=recorder.metrics)


@pytest.mark.parametrize(("batch_rows", "streams"), [(1, 1), (1, 7), (64, 2), (10_000, 1), (10_000, 7)])
def test_however_rows_come_phases_answers_and_memory_are_the_same(
    fake_engine_python: Callable[..., str], reference: Run, batch_rows: int, streams: int
) -> None:
    opts = options(
        fake_engine_python("--chunk-rows=16"),
        engine=virtual_config(**_POOLS),
        generation=GenerationSpec(max_tokens=_MAX_TOKENS),
    )
    run = feed(opts, batch_rows=batch_rows, streams=streams)
    assert run.texts == {f"row {row}": virtual_text(f"row {row}") for row in range(_ROWS)}
    # Never for want of input, but where the table ends; and as often as if all rows had been there.
    assert not any(run.switches("starved")[:-1])
    assert abs(len(run.refills()) - len(reference.refills())) <= 2, (run.refills(), reference.refills())
    assert run.mean_refill() == pytest.approx(reference.mean_refill(), rel=0.05)
    # Memory: what fits into the host pool, what waits for the next phase, a chunk a stream, and an Arrow batch each.
    assert run.metrics["most_held"] <= 2 * _HOST_ROWS + 16 * streams
    assert run.most_ahead <= 2 * _HOST_ROWS + (32 + min(batch_rows, _ROWS // streams + 1)) * streams
