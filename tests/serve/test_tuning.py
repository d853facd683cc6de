"""A served engine begins with what was remembered of tables like the job's."""

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from pipemax.domain.step_records import StepLimits
from pipemax.tuning.remembered import Entry, TableKind, keep_entry
from pipemax.tuning.step_fit import WorkCosts
from pipemax.wire import GenerationSpec, JobOutlook
from pipemax_spark.executor.client import complete
from tests.fakes.collector import FakeCollector
from tests.serve.support import options, request_batch, server_stats

_LIMITS = StepLimits(step_tokens=2_048, running_rows=16)
_BATCH_ROWS, _MOST_BATCHES = 8, 3_000
_OF_CHOICES = Entry(
    kind=TableKind(
        mean_prompt=4.0, mean_output=1.0, prompt_spread=0.0, shared_share=0.0, is_constrained=True
    ),
    limits=_LIMITS,
    costs=WorkCosts(prompt_token_s=1e-5, decode_s=1e-5, kv_token_s=0.0, prompts_per_output=4.0),
    gain=None,
    pairs=4,
    date="2026-11-27",
)


def test_rows_with_choices_find_the_tuning_of_a_table_with_choices(
    shared_engine_python: str, tmp_path: Path
) -> None:
    tunings = tmp_path / "model.yaml"
    keep_entry(tunings, _OF_CHOICES)
    with FakeCollector() as collector:
        collector.outlook = JobOutlook(job_id="choices", rows_left=1_000_000, engines=1)
        opts = options(
            shared_engine_python,
            generation=GenerationSpec(choice=("yes", "no")),
            collector=collector.address("t"),
            job_id="choices",
            most_limits=[_LIMITS.step_tokens, _LIMITS.running_rows],
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
