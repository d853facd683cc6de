"""A served engine begins with what was remembered of tables like the job's."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from pipemax.domain.step_records import StepLimits
from pipemax.tuning.remembered import Entry, TableKind, keep_entry
from pipemax.tuning.step_fit import WorkCosts
from pipemax.wire import GenerationSpec, JobOutlook
from pipemax_spark.executor.client import complete
from tests.fakes.collector import FakeCollector
from tests.serve.support import (
    assert_exactly_once,
    files_of,
    options,
    request_batch,
    server_of,
    server_stats,
)

_LIMITS = (2_048, 16)
_BATCH_ROWS, _MOST_BATCHES = 8, 3_000
_OF_CHOICES = TableKind(
    mean_prompt=4.0, mean_output=1.0, prompt_spread=0.0, shared_share=0.0, is_constrained=True
)
_OF_PROMPTS = TableKind(mean_prompt=2.0, mean_output=4.0, prompt_spread=0.0, shared_share=0.0)


def remember(tunings: Path, limits: tuple[int, int], kind: TableKind = _OF_PROMPTS) -> None:
    """Write down that these limits are the best for tables of the kind: at first, prompts of two words."""
    entry = Entry(
        kind=kind,
        limits=StepLimits(step_tokens=limits[0], running_rows=limits[1]),
        costs=WorkCosts(prompt_token_s=1e-5, decode_s=1e-5, kv_token_s=0.0, prompts_per_output=4.0),
        gain=None,
        pairs=4,
        date="2026-11-27",
    )
    keep_entry(tunings, entry)


def test_rows_with_choices_find_the_tuning_of_a_table_with_choices(
    shared_engine_python: str, tmp_path: Path
) -> None:
    tunings = tmp_path / "model.yaml"
    remember(tunings, _LIMITS, _OF_CHOICES)
    with FakeCollector() as collector:
        collector.outlook = JobOutlook(job_id="choices", rows_left=1_000_000, engines=1)
        opts = options(
            shared_engine_python,
            generation=GenerationSpec(choice=("yes", "no")),
            collector=collector.address("t"),
            job_id="choices",
            most_limits=_LIMITS,
            tunings=str(tunings),
        )

        def until_tuned() -> Iterator[pa.RecordBatch]:
            for batch in range(_MOST_BATCHES):
                first = batch * _BATCH_ROWS
                rows = range(first, first + _BATCH_ROWS)
                yield request_batch([f"is row {row} right" for row in rows], first)
                if server_stats(opts).tuning:
                    return
                time.sleep(0.01)  # the engine looks after its limits once a second

        for _ in complete(until_tuned(), opts, task="task"):
            pass
        assert collector.reports[-1].tuning.startswith(
            "Tuned: steps of 2,048, 16 rows, vLLM's default: it was best before"
        )


@pytest.mark.long  # half a minute; tests/unit/serve/flow/test_killed_while_tuning.py kills a replica
def test_a_server_that_is_killed_while_it_tunes_loses_no_row_and_its_successor_tunes_itself(
    fake_engine_python: Callable[..., str], tmp_path: Path
) -> None:
    with FakeCollector() as collector:
        collector.outlook = JobOutlook(job_id="long", rows_left=10_000_000, engines=1)
        opts = options(
            fake_engine_python("--stats-push-s=0.2"),
            collector=collector.address("t"),
            job_id="long",
            most_limits=(2_048, 64),
            tunings=str(tmp_path / "model.yaml"),
            steps_s=10.0,
            tokens_per_s=500.0,
        )
        num_sent, killed = 0, False

        def until_tuned() -> Iterator[pa.RecordBatch]:
            nonlocal num_sent, killed
            for _ in range(_MOST_BATCHES):
                yield request_batch(
                    [f"prompt {row}" for row in range(num_sent, num_sent + _BATCH_ROWS)], num_sent
                )
                num_sent += _BATCH_ROWS
                if not killed and "tuning: sweep" in files_of(opts).log.read_text(encoding="utf-8"):
                    os.kill(server_of(opts).pid, signal.SIGKILL)
                    killed = True
                if killed and collector.reports[-1].tuning:
                    return
                time.sleep(0.05)

        batches = [*complete(until_tuned(), opts, task="task")]
        assert_exactly_once(batches, num_sent)
        assert killed
        assert collector.reports[-1].tuning.startswith("Tuned: steps of ")
        assert files_of(opts).log.read_text(encoding="utf-8").count("tuning: sweep") == 2
