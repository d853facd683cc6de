"""A cascade whose output is an Iceberg table: its parts stay in the work directory, its answers go to the table."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.job.cascade import CascadeJob
from pipemax_spark.storage.cascade_store import CascadeStore
from tests.fakes.settings import fake_config
from tests.spark.conftest import Nights
from tests.spark.iceberg.conftest import IcebergJobs

pytestmark = pytest.mark.iceberg


class _DiedError(Exception):
    """In place of a death of the driver."""


def run_cascade(run: IcebergJobs, nights: Nights, **changes: Any) -> Any:
    with run.terminal() as terminal:
        return CascadeJob(run.spark, replace(run.defaults, input=nights.input, **changes), terminal).run()


def test_a_cascade_over_an_iceberg_table_is_resumed_and_keeps_a_ledger_of_what_comes_later(
    run: IcebergJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.defaults = replace(
        run.defaults,
        id_columns=("id",),
        generation=GenerationSpec(choice=("bread", "cheese", "fruit", "nuts")),
        cascade=fake_config("fake-small", errs=0.2),
        agree=0.8,
        confidence=0.8,
        incremental=True,
    )
    nights = Nights(run)
    nights.append([(i, f"shop sells item {i}") for i in range(600)])

    def die(self: CascadeStore, name: str, text: str) -> str:
        put(self, name, text)
        raise _DiedError(name)

    put = CascadeStore.put
    with monkeypatch.context() as patch:
        patch.setattr(CascadeStore, "put", die)
        for _ in range(2):  # after the draw, and after the ledger
            with pytest.raises(_DiedError):
                run_cascade(run, nights)
    summary = run_cascade(run, nights)
    assert (summary.complete, summary.output_format) == (True, "Iceberg")
    kept = summary.cascade["rows_kept"]
    assert kept > 100
    nights.append([(i, f"shop sells item {i}") for i in range(600, 640)])
    ledger = run_cascade(run, nights).cascade["ledger"]
    assert (ledger["batches"], ledger["seen_rows"], ledger["number"]) == (2, 640, 1)
    assert Counter(row["annotation"]["model"] for row in run.rows()) == {
        "fake-small": kept,
        "fake": 640 - kept,
    }
    assert sorted(row["id"] for row in run.rows()) == list(range(640))
    nights.append([(640, "shop sells item 640")])
    ledger = run_cascade(run, nights, cascade_reset=True).cascade["ledger"]
    assert (ledger["batches"], ledger["seen_rows"], ledger["number"]) == (1, 1, 2)
