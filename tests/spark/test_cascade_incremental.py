"""``--cascade`` with ``--incremental``: one ledger keeps the promise for the table so far, whatever happens."""

import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.cascade import ledger as ledgers
from pipemax_spark.cascade.batches import ClosedBatch, OpenBatch
from pipemax_spark.cascade.ordered_rows import LabelledRow
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.errors import JobError, JobFailedError, RowCountError
from pipemax_spark.job.annotation_job import AnnotationJob
from pipemax_spark.job.cascade import CascadeJob, run_job
from pipemax_spark.job.cascade_batches import TableLedger
from pipemax_spark.job.cascade_decisions import decided
from pipemax_spark.request.questions import read_questions
from pipemax_spark.rows.position import Positions
from pipemax_spark.storage.cascade_store import CascadeStore, Epochs, Records
from pipemax_spark.storage.tables import DeltaTable
from tests.fakes.settings import fake_config
from tests.spark.conftest import Jobs, Nights

_CHOICES = ("bread", "cheese", "fruit", "nuts")


class CascadeNights(Nights):
    """Nights of a cascade."""

    def run_night(self, **changes: Any) -> Any:
        """Return the night's summary."""
        options = replace(self.jobs.defaults, input=self.input, **changes)
        with self.jobs.terminal() as terminal:
            return CascadeJob(self.jobs.spark, options, terminal).run()

    def facts(self, **changes: Any) -> dict[str, Any]:
        """Run a night and return what its summary says of the cascade."""
        summary = self.run_night(**changes)
        assert summary.complete
        facts: dict[str, Any] = summary.cascade
        return facts

    def models(self) -> Counter[str]:
        return Counter(row["annotation"]["model"] for row in self.jobs.rows())

    @property
    def place(self) -> str:
        """The directory of the epochs."""
        (rows,) = {path.parent.parent for path in Path(self.jobs.output).rglob("cascade/*/1/rows")}
        return str(rows)

    def records(self, epoch: int) -> dict[str, str]:
        return Records(self.jobs.spark, f"{self.place}/{epoch}/records").all()


class DiedError(Exception):
    """In place of a death of the driver."""


def die_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    *,
    name: str | None,
    after: bool,
    saw: list[str] | None = None,
) -> None:
    """Have a method raise, once for its call with this first argument, before or after its work.

    The texts with which it is called go to ``saw``.
    """
    real = getattr(owner, method)

    def dying(self: Any, *arguments: Any) -> Any:
        if name is not None and arguments[0] != name:
            return real(self, *arguments)
        if saw is not None:
            saw.extend(argument for argument in arguments if isinstance(argument, str))
        if after:
            real(self, *arguments)
        raise DiedError(method)

    monkeypatch.setattr(owner, method, dying)


def large_answers(jobs: Jobs, source: str) -> dict[int, str]:
    """What the large model says of all rows, in a table of its own."""
    output = str(jobs.directory / "large-alone")
    options = replace(jobs.defaults, input=source, cascade=None, incremental=False, output=output)
    with jobs.terminal() as terminal:
        AnnotationJob(jobs.spark, options, terminal).run()
    rows = jobs.spark.read.format("delta").load(output).collect()
    return {row["id"]: row["annotation"]["text"] for row in rows}


def items(first: int, end: int) -> list[tuple[int, str]]:
    return [(i, f"shop sells item {i}") for i in range(first, end)]


@pytest.fixture
def shop(run: Jobs, monkeypatch: pytest.MonkeyPatch) -> CascadeNights:
    run.defaults = replace(
        run.defaults,
        id_columns=("id",),
        generation=GenerationSpec(choice=_CHOICES),
        cascade=fake_config("fake-small", errs=0.2),
        agree=0.8,
        confidence=0.8,
        incremental=True,
    )
    seeds = iter(f"{number:032x}" for number in range(1_000))
    monkeypatch.setattr(ledgers, "new_seed", lambda: next(seeds))
    return CascadeNights(run)


@pytest.mark.long  # three nights
def test_each_epoch_goes_on_with_the_ledger_that_the_latest_batch_has_left(
    spark: Any, tmp_path: Path
) -> None:
    epochs = Epochs(spark, str(tmp_path))
    book = TableLedger(
        epochs, Promise(agree=0.97, confidence=0.95), answers=[""], spec_hash="spec", small_model="small"
    )
    assert epochs.open() is None
    assert epochs.begin(spark.range(0)) is None
    first = epochs.begin(spark.range(1_000))
    assert first is not None
    assert book.batch_of(first, is_incremental=False) is None
    batch = book.batch_of(first, is_incremental=True)
    assert batch is not None
    assert (batch.ledgers[""].batches, batch.draw.rows, batch.is_audited) == (0, 1_000, False)
    assert book.batch_of(first, is_incremental=False) == batch, "it stays a batch, with the coins that it has"
    found = epochs.open()
    assert found is not None
    assert found.number == 1
    first.close()

    second = epochs.begin(spark.range(10))
    assert second is not None
    batch = book.batch_of(second, is_incremental=True)
    assert batch is not None
    ledger = batch.ledgers[""]
    assert (ledger.batches, ledger.seen_rows, batch.draw.number) == (1, 1_000, 2)
    with ThreadPoolExecutor() as pool:
        texts = {*pool.map(partial(second.put, "certificate"), ("one run's", "another run's"))}
    assert len(texts) == 1, "two runs that put a record at once read the same one"
    assert second.put("certificate", "a third run's") in texts

    assert epochs.reset() == 2
    assert epochs.open() is None, "the open epoch is given up"
    third = epochs.begin(spark.range(10))
    assert third is not None
    batch = book.batch_of(third, is_incremental=True)
    assert batch is not None
    ledger = batch.ledgers[""]
    assert (third.number, ledger.number, ledger.seen_rows, batch.kept_before) == (3, 2, 0, 0)
    assert epochs.reset(known_number=6) == 7


def test_the_ledgers_of_all_questions_are_one_record_of_a_batch(spark: Any, tmp_path: Path) -> None:
    epochs, promise = Epochs(spark, str(tmp_path)), Promise(agree=0.8, confidence=0.8).of_each(2)
    names = ("kind", "deal")
    book = TableLedger(epochs, promise, answers=names, spec_hash="spec", small_model="small")
    first = epochs.begin(spark.range(1_000))
    assert first is not None
    batch = book.batch_of(first, is_incremental=True)
    assert batch is not None
    assert batch.is_audited
    right, wrong = ([LabelledRow(1.0 - row / 100, 0.5, bit) for row in range(60)] for bit in (False, True))
    decisions = decided(first, batch, {"kind": right, "deal": wrong}, 60)
    assert {name: one.cut.kept.value for name, one in decisions.items()} == {"kind": "all", "deal": "above"}
    assert Records(spark, first.path("records")).all().keys() == {"draw", "certificate"}
    assert decided(first, batch, dict.fromkeys(names, ()), 0) == decisions, "the record is what counts"
    model = "named_struct('model', IF(id < 7, 'small', 'large')) AS annotation"
    first.write("answers", spark.range(1_000).selectExpr("id", model))
    first.close()

    second = epochs.begin(spark.range(10))
    assert second is not None
    batch = book.batch_of(second, is_incremental=True)
    assert batch is not None
    assert batch.ledgers == {name: one.ledger for name, one in decisions.items()}
    assert (batch.kept_before, batch.draw.number, batch.draw.confidence) == (7, 2, 0.9)
    with pytest.raises(JobFailedError, match="60 of them have a large answer"):
        decided(second, batch, {"kind": right, "deal": wrong}, 61)


def test_rows_that_another_run_has_written_down_meanwhile_stay(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (CascadeStore(spark, str(tmp_path), 1) for _ in range(2))
    first.write("rows", spark.range(3))
    # The second run has looked for the part before the first one wrote it.
    monkeypatch.setattr(DeltaTable, "exists", lambda _: False)
    second.write("rows", spark.range(5))
    assert second.rows().count() == 3


@pytest.mark.long  # seven jobs
def test_each_night_is_a_batch_of_one_ledger_and_its_promise_holds_for_the_table_so_far(
    shop: CascadeNights,
) -> None:
    shop.append(items(0, 600))
    first = shop.facts()
    assert first["sentence"].startswith(
        f"After run 1, {first['rows_kept']} of 600 rows keep the small answer."
    )
    shop.append(items(600, 650))
    second = shop.facts()
    assert "all 50 rows go to the large model, too few for a small one." in shop.jobs.printed
    assert {row["annotation"]["model"] for row in shop.jobs.rows() if row["id"] >= 600} == {"fake"}
    shop.append(items(650, 1_050))
    third = shop.facts()
    seen = [facts["ledger"]["seen_rows"] for facts in (first, second, third)]
    assert (seen, third["ledger"]["batches"]) == ([600, 650, 1_050], 3)
    assert [facts["rows_kept"] > 100 for facts in (first, second, third)] == [True, False, True]
    assert shop.models()["fake-small"] == first["rows_kept"] + third["rows_kept"]
    draws = [json.loads(shop.records(epoch)["draw"]) for epoch in (1, 2, 3)]
    assert len({batch["draw"]["seed"] for batch in draws}) == 3
    assert draws[2]["ledger"] == second["ledger"]
    large = large_answers(shop.jobs, shop.input)
    for end, facts in ((600, first), (650, second), (1_050, third)):
        rows = [row for row in shop.jobs.rows() if row["id"] < end]
        misses = sum(row["annotation"]["text"] != large[row["id"]] for row in rows)
        assert len(rows) == end
        assert 0 < misses <= facts["ledger"]["max_misses"] <= end / 5
    assert sorted(shop.ids()) == list(range(1_050))
    nothing = shop.run_night()
    assert (nothing.complete, nothing.rows_out, nothing.engines) == (True, 0, 0)
    with pytest.raises(RowCountError, match="has no rows"):
        shop.run_night(fail_if_empty=True)


@pytest.mark.long  # a run for each place
def test_a_night_that_dies_between_any_two_steps_is_closed_with_the_same_ledger_and_then_come_new_rows(
    shop: CascadeNights, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.append(items(0, 600))
    shop.facts()
    shop.append(items(600, 1_000))
    places: list[tuple[type, str, str | None, bool]] = [
        (CascadeStore, "write", "rows", True),
        (CascadeStore, "put", "draw", False),
        (CascadeStore, "put", "draw", True),
        (CascadeStore, "write", "sample", True),
        (CascadeStore, "put", "certificate", False),
        (CascadeStore, "put", "certificate", True),
        (CascadeStore, "write", "answers", True),
        (CascadeStore, "close", None, False),
        (CascadeStore, "close", None, True),
    ]
    texts: list[str] = []
    for owner, method, name, after in places:
        with monkeypatch.context() as patch:
            die_at(patch, owner, method, name=name, after=after, saw=texts)
            with pytest.raises(DiedError):
                shop.run_night()
        if name == "rows":
            shop.append(items(1_000, 1_050))
    with monkeypatch.context() as patch:
        die_at(patch, Positions, "write", name=None, after=False, saw=texts)
        with pytest.raises(DiedError):
            shop.run_night()
    before = {epoch: shop.records(epoch) for epoch in (1, 2, 3)}
    assert before[2]["certificate"] in texts, "computed before the death that lost it, and after"
    summary = shop.run_night()
    assert (summary.complete, summary.rows_out) == (True, 0)
    assert {epoch: shop.records(epoch) for epoch in (1, 2, 3)} == before
    assert Epochs(shop.jobs.spark, shop.place).count() == 3
    assert shop.ids() == list(range(1_050))
    batch = OpenBatch.from_json(before[3]["draw"])
    assert batch is not None
    ledger = batch.ledgers[""]
    assert (ledger.batches, ledger.seen_rows) == (2, 1_000)
    assert ledger == ClosedBatch.from_json(before[2]["certificate"]).ledger
    stored = CascadeStore(shop.jobs.spark, shop.place, 2).read("small").collect()
    small = {row["id"]: row["annotation"]["text"] for row in stored}
    kept = [
        row for row in shop.jobs.rows() if row["annotation"]["model"] == "fake-small" and row["id"] >= 600
    ]
    assert kept
    assert all(row["annotation"]["text"] == small[row["id"]] for row in kept)


@pytest.mark.long  # five jobs
def test_a_night_that_a_limit_ends_is_finished_first_by_the_next_one(shop: CascadeNights) -> None:
    shop.append(items(0, 600))
    ended = shop.run_night(max_tokens_total=10)
    assert (ended.complete, ended.ended_by) == (False, "max_tokens_total")
    shop.append(items(600, 610))
    facts = shop.facts()
    assert (facts["ledger"]["batches"], facts["ledger"]["seen_rows"]) == (2, 610)
    assert shop.ids() == list(range(610))
    assert json.loads(shop.records(1)["draw"])["draw"]["rows"] == 600


@pytest.mark.long  # a run for each place, and the large model's job
def test_nights_of_questions_keep_a_ledger_for_each_and_are_finished_by_the_next_run(
    shop: CascadeNights, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GenerationSpec()
    asked = {
        "kind": {"template": " Kind?", "choice": [*_CHOICES]},
        "size": {"template": " Size?", "choice": ["small", "middling", "large"]},
    }
    shop.jobs.defaults = replace(
        shop.jobs.defaults, generation=plain, ask=read_questions(asked, plain), agree=0.7
    )
    shop.append(items(0, 600))
    first = shop.facts()
    shop.append(items(600, 1_000))
    for name, after in (("certificate", False), ("certificate", True)):
        with monkeypatch.context() as patch:
            die_at(patch, CascadeStore, "put", name=name, after=after)
            with pytest.raises(DiedError):
                shop.run_night()
    before = shop.records(2)
    shop.append(items(1_000, 1_020))
    third = shop.facts()
    assert shop.records(2) == before
    assert shop.records(3).keys() == {"draw"}
    assert sorted(shop.ids()) == list(range(1_020))
    ends = ClosedBatch.all_from_json(before["certificate"])
    assert ends.keys() == third["questions"].keys() == {"kind", "size"}
    opened = OpenBatch.from_json(shop.records(3)["draw"])
    assert opened is not None
    assert opened.ledgers == {name: end.ledger for name, end in ends.items()}
    assert {ledger.confidence for ledger in opened.ledgers.values()} == {0.9}
    assert third["sentence"].endswith("Together this holds with 80 % confidence.")
    kept = shop.models()["fake-small"]
    assert first["rows_kept"] > 50
    assert opened.kept_before == kept > first["rows_kept"]
    shop.jobs.defaults = replace(shop.jobs.defaults, cascade=None, incremental=False)
    output = str(shop.jobs.directory / "large-alone")
    with shop.jobs.terminal() as terminal:
        alone = replace(shop.jobs.defaults, input=shop.input, output=output)
        AnnotationJob(shop.jobs.spark, alone, terminal).run()
    large = {row["id"]: row for row in shop.jobs.spark.read.format("delta").load(output).collect()}
    for name, ledger in opened.ledgers.items():
        misses = sum(row[name]["text"] != large[row["id"]][name]["text"] for row in shop.jobs.rows())
        assert 0 < misses <= ledger.max_misses <= 0.3 * 1_000
    for row in shop.jobs.rows():
        models = {row[name]["model"] for name in ("kind", "size", "annotation")}
        assert len(models) == 1, "a row is done as a whole"


@pytest.mark.long  # three jobs
def test_a_lost_work_directory_and_a_reset_each_begin_another_ledger_which_is_counted(
    shop: CascadeNights,
) -> None:
    shop.append(items(0, 20))
    shop.facts()
    shutil.rmtree(Path(shop.jobs.output, "_pipemax"))
    shop.append(items(20, 40))
    facts = shop.facts()
    assert "the cascade's ledger is gone with its work directory" in " ".join(shop.jobs.printed.split())
    assert (facts["ledger"]["number"], facts["ledger"]["seen_rows"]) == (2, 20)
    assert "2nd ledger" in facts["sentence"]
    shop.append(items(40, 70))
    facts = shop.facts(cascade_reset=True)
    assert "the table's 3rd draw begins" in shop.jobs.printed
    assert (facts["ledger"]["number"], facts["ledger"]["seen_rows"]) == (3, 30)
    shutil.rmtree(Path(shop.jobs.output, "_pipemax"))
    shop.append(items(70, 80))
    assert shop.facts()["ledger"]["number"] == 4, "the table counts, too"
    assert shop.ids() == list(range(80))


@pytest.mark.long  # three jobs
def test_copies_of_rows_without_ids_that_come_later_are_each_done(shop: CascadeNights) -> None:
    shop.jobs.defaults = replace(shop.jobs.defaults, id_columns=())
    shop.append(items(0, 20))
    shop.facts()
    shop.append([*items(10, 30), *items(15, 16)])
    shop.facts()
    assert shop.ids() == sorted([*range(20), *range(10, 30), 15])
    shop.append(items(0, 5))
    facts = shop.facts(incremental=False)
    assert facts["sentence"].startswith("All 5 rows go to the large model")
    assert shop.ids() == sorted([*range(20), *range(10, 30), 15, *range(5)])


@pytest.mark.long  # four jobs
def test_only_a_reset_draws_again_for_rows_of_an_unfinished_run(
    shop: CascadeNights, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.append(items(0, 400))
    with monkeypatch.context() as patch:
        die_at(patch, CascadeStore, "write", name="sample", after=True)
        with pytest.raises(DiedError):
            shop.run_night(incremental=False)
    first = json.loads(shop.records(1)["draw"])
    facts = shop.facts(incremental=False, cascade_reset=True)
    assert "the table's 2nd draw begins" in shop.jobs.printed
    second = facts["certificate"]["draw"]
    assert (first["number"], second["number"], second["seed"] != first["seed"]) == (1, 2, True)
    assert "This is the table's 2nd draw" in facts["sentence"]
    assert shop.ids() == list(range(400))
    summary = shop.run_night(incremental=False, cascade_reset=True)
    assert summary.complete


def test_a_reset_without_a_cascade_is_refused(shop: CascadeNights) -> None:
    options = replace(shop.jobs.defaults, input=shop.input, cascade=None, cascade_reset=True)
    with shop.jobs.terminal() as terminal, pytest.raises(JobError, match="give it with --cascade"):
        run_job(shop.jobs.spark, options, terminal)
