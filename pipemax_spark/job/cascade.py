"""A cascade: a small model answers all rows, and keeps those of which few would be answered otherwise by a large one.

It is a run of jobs over rows that are fixed together (an *epoch*), each of which is resumed as any job is:

1. the rows that are left are written down, and the small model answers them in a table of its own;
2. coins are drawn and recorded, and the large model answers the rows that they sample, in another table;
   before, the pilot chooses how many (``run_pilot``), and after, some are asked again (``cascade_repeats``);
3. from the sampled rows alone follows the certificate, which is recorded: a pure function of what is stored;
4. the output's job takes over the answers that are known, and asks the large model for the other rows.

The tables and records stay in the work directory. Whatever dies, the next run finds the same draw and certificate. The
decisions are those of ``pipemax_spark.cascade``.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipemax_spark.cascade.coins import new_seed
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.pilot import PILOT_ROWS, Assessment, Outlook, pilot_share
from pipemax_spark.errors import IfRunning, JobError, JobFailedError, OtherRunError
from pipemax_spark.job import run_pilot
from pipemax_spark.job.annotation_job import AnnotationJob, made_output
from pipemax_spark.job.cascade_batches import (
    TableLedger,
    reset_if_needed,
    run_batches,
)
from pipemax_spark.job.cascade_decisions import DRAW, decided
from pipemax_spark.job.cascade_facts import Finding, certified_facts, passed_facts
from pipemax_spark.job.cascade_options import answers_of, promise_of, small_options
from pipemax_spark.job.cascade_phases import PhaseEndedError, Phases, reading
from pipemax_spark.job.cascade_pilot import pilot, without_output
from pipemax_spark.job.cascade_repeats import asked_again
from pipemax_spark.job.cascade_rows import CascadeRows, manifest_digest, sampled_rows
from pipemax_spark.job.checks import check_engine, check_job, input_of
from pipemax_spark.job.job import EngineCall, Job, JobCall, new_run_id
from pipemax_spark.job.record import EndRecord
from pipemax_spark.job.run_pilot import RunPilot, comes_first
from pipemax_spark.job.settings import job_settings
from pipemax_spark.options import Certified, JobOptions
from pipemax_spark.report.summary import Summary
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.spec import AnnotationSpec
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.incremental import Batch
from pipemax_spark.rows.order_by import first_rows, order_of
from pipemax_spark.rows.remaining import Remaining, rows_where
from pipemax_spark.rows.workdir import CHECKPOINTS, WorkDirectory, usable_work_base
from pipemax_spark.storage.cascade_store import CascadeStore, Epochs
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.names import is_path
from pipemax_spark.storage.output_table import open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LEFT_OUT = "left_out"
"""The record of how many rows ``--limit`` left for a later epoch."""


class CascadeJob:
    """One run of a job with ``--cascade``."""

    def __init__(self, spark: "SparkSession", options: JobOptions, terminal: Terminal) -> None:
        """Raise ``JobError`` for options that a cascade cannot have."""
        assert options.cascade is not None, "the job has no cascade"
        self._spark = spark
        self._options = options
        self._terminal = terminal
        self._promise, self._answers = promise_of(options), answers_of(options)
        self._small = small_options(options)
        self._models = (str(self._small.engine["model"]), str(options.engine["model"]))
        self._phases = Phases(spark, options, terminal, small=self._small)
        self._is_filling = False

    def run(self) -> Summary | None:
        """Run what is left of the cascade; return as ``AnnotationJob.run`` does."""
        options = self._options
        with job_settings(self._spark):
            final = replace(options, cascade=None, certified=self._certified())
            # What is done again is few rows, for which nothing is worth proving.
            if options.retry_errors or options.redo_changed:
                return self._phases.run(final)
            if options.dry_run:
                self._phases.run(final)
                self._say(f"both models answer {PILOT_ROWS} rows for a forecast; nothing is written")
                said = self._forecast()
                self._say(said.sentence)
                kept = ":".join(f"{share:.3f}" for share in (said.kept.low, said.kept.middle, said.kept.high))
                self._say(f"for its hours on a node: pipemax plan-capacity --kept-share {kept}")
                return None
            call = self._call(final)
            end = EndRecord(call)  # of what comes before the job that fills the output, which has its own
            try:
                end.begin()
                return self._cascade(call, end)
            except (JobError, JobFailedError) as error:
                if not self._is_filling:
                    end.close(error)
                if not isinstance(error, OtherRunError) or options.if_running is not IfRunning.SKIP:
                    raise
                self._say(f"skipped: {error.args[0]} (--if-running skip)")
                return end.summary

    def _cascade(self, call: JobCall, end: EndRecord) -> Summary | None:
        options, spark = call.options, self._spark
        checked = check_job(call)
        if checked.source.is_blank:
            return self._phases.run(options)
        if options.source.has_images(checked.source.rows.schema):
            raise JobError(
                "--cascade compares requests, and an image may change behind its path; leave it out"
            )
        made_output(call, checked)
        base = usable_work_base(spark, options.work_dir, call.table.location())
        root = f"{base}/{call.table.table_id()}/cascade"
        with WorkDirectory(
            HadoopFiles(spark),
            root,
            table_id=checked.spec.hash,
            run_id=call.run_id,
            say=self._terminal.warn,
            takes_over=options.if_running is IfRunning.TAKE_OVER,
        ) as work:
            epochs = Epochs(spark, f"{root}/{checked.spec.hash}")
            run_epoch = partial(self._epoch, end)
            reset_if_needed(call, checked, epochs, self._say)
            if options.incremental:
                checkpoint = options.checkpoint or f"{base}/{call.table.table_id()}/{CHECKPOINTS}"
                job = Job.of(replace(call, options=replace(options, checkpoint=checkpoint)), checked, work)
                summaries = run_batches(job, epochs, run_epoch)
                return summaries[-1] if summaries else self._phases.run(job.options)
            summary, store = None, epochs.open()
            if store is not None:
                self._record_left_out(call, checked, store)
                summary = run_epoch(options, checked, store, epochs)
                if summary is None or not _is_done(summary) or options.limit is not None:
                    return summary
            store = self._next_epoch(call, checked, epochs)
            if store is None:
                return summary or self._phases.run(options)
            self._record_left_out(call, checked, store)
            return run_epoch(options, checked, store, epochs)

    def _epoch(
        self, end: EndRecord, final: JobOptions, checked: Checked, store: CascadeStore, epochs: Epochs
    ) -> Summary | None:
        """Run the phases that an epoch has not had yet, as far as the limits allow."""
        self._is_filling = False
        self._phases.begin_epoch()
        try:
            return self._run_epoch(final, checked, store, epochs)
        except PhaseEndedError as ended:
            return ended.recorded(end, checked, self._terminal)

    def _run_epoch(
        self, final: JobOptions, checked: Checked, store: CascadeStore, epochs: Epochs
    ) -> Summary | None:
        num_rows, phases = store.rows().count(), self._phases
        final = self._with(
            replace(final, **reading(store.path("rows"))),
            whole=None if checked.id_columns else checked.source.rows,
            **({} if self._options.incremental else _others(store, checked.rows_in - num_rows)),
        )
        ledger = TableLedger(
            epochs,
            self._promise,
            answers=[answer.name for answer in self._answers],
            spec_hash=checked.spec.hash,
            small_model=self._models[0],
        )
        batch = ledger.batch_of(store, is_incremental=self._options.incremental)
        if batch is not None and not batch.is_audited:
            facts = self._common_facts(num_rows) | passed_facts(batch, confidence=final.confidence)
            self._say(
                f"all {num_rows:,} rows go to the large model, too few for a small one. {facts['sentence']}"
            )
            return self._fill(self._with(final, facts=facts), store)
        draw = self._draw(store, num_rows, checked, epochs.last_reset()[0]) if batch is None else batch.draw
        if batch is None and self._promise.allowed_differing(num_rows, draw.sample_share) is None:
            sentence = f"All {num_rows:,} rows go to the large model: too few for a sample to prove anything."
            return self._fill_alone(final, store, sentence)
        pilot, decision = None, None
        if draw.pilot_share:
            pilot = RunPilot(store, draw, final, self._answers, phases, checked)
        if pilot is not None and comes_first(num_rows, self._small.engine):
            decision = pilot.before_small_pass()
            if decision.outlook is Outlook.REFUSED:
                pilot.write_answers(decision, self._models)
                sentence = f"All {num_rows:,} rows go to the large model. {decision.sentence}"
                final = replace(final, reuse=store.path("answers"))
                return self._fill_alone(final, store, sentence, rows_pilot=decision.rows)
            if decision.outlook is Outlook.MAY_NOT_PAY:
                self._terminal.warn(decision.sentence)
        phases.small(store, "rows", "small", says=f"1 of 3, the small model answers {num_rows:,} rows")
        if pilot is not None:
            decision = decision or pilot.after_small_pass()
            draw = decision.draw
        if not store.exists("sample"):
            store.write("sample", sampled_rows(store.rows(), draw, checked.id_columns))
        num_sampled = store.read("sample").count()
        if num_sampled:
            what = f"2 of 3, the large model answers {num_sampled:,} sampled rows"
            phases.large(store, "sample", "labels", checked, says=what)
        rows = CascadeRows(
            final,
            rows=store.rows(),
            small=store.read("small"),
            labels=store.read("labels") if num_sampled else store.read("small").limit(0),
            pilot=None if decision is None else store.read(run_pilot.LABELS),
        )
        repeated = asked_again(store, rows, draw, self._answers, phases, checked)
        of_rows = list(rows.labelled(draw, self._answers))
        labelled = {one.name: [row[place] for row in of_rows] for place, one in enumerate(self._answers)}
        of_models = {name: [one.row for one in of_answer] for name, of_answer in labelled.items()}
        decisions = decided(store, batch or draw, of_models, num_sampled)
        findings = [
            Finding(
                answer=answer,
                labelled=labelled[answer.name],
                certificate=decisions[answer.name],
                asked_again=times,
            )
            for answer, times in zip(self._answers, repeated, strict=True)
        ]
        if not store.exists("answers"):
            store.write(
                "answers",
                rows.answered(
                    [finding.applied for finding in findings],
                    self._answers,
                    checked.schema,
                    checked.spec.hash,
                    models=self._models,
                ),
            )
        kept = ledger.kept(store)
        facts = {
            **self._common_facts(num_rows),
            "rows_kept": kept,
            "rows_sampled": num_sampled,
            **certified_facts(findings, kept, confidence=final.confidence, shows_answers=not final.no_sample),
            **({} if decision is None else {"rows_pilot": decision.rows}),
        }
        self._say(f"3 of 3. {facts['sentence']}")
        return self._fill(self._with(replace(final, reuse=store.path("answers")), facts=facts), store)

    def _common_facts(self, num_rows: int) -> dict[str, Any]:
        return {
            "rows": num_rows,
            "phases": self._phases.done,
            "small_model": self._models[0],
            "large_model": self._models[1],
        }

    def _with(self, final: JobOptions, **known: Any) -> JobOptions:
        assert final.certified is not None
        return replace(final, certified=replace(final.certified, **known))

    def _fill_alone(
        self, final: JobOptions, store: CascadeStore, sentence: str, **facts: Any
    ) -> Summary | None:
        """Fill the output with the large model's answers only, and have the report say why."""
        self._say(sentence)
        known = {"sentence": sentence, "rows_kept": 0, "rows_sampled": 0, **facts}
        return self._fill(self._with(final, facts=self._common_facts(store.rows().count()) | known), store)

    def _fill(self, final: JobOptions, store: CascadeStore) -> Summary | None:
        """Fill the output, and close the epoch if all of its rows are in it."""
        self._is_filling = True
        summary = self._phases.run(final)
        if summary is not None and _is_done(summary):
            store.close()
        return summary

    def _next_epoch(self, call: JobCall, checked: Checked, epochs: Epochs) -> CascadeStore | None:
        """Begin the next epoch, of the rows that the output lacks, up to ``--limit``; None if there are none."""
        limit, left = call.options.limit, self._rows_left(call, checked)
        if limit is None:
            return epochs.begin(left)
        return epochs.begin(first_rows(left, order_of(self._spark, call.options.order_by), limit))

    def _record_left_out(self, call: JobCall, checked: Checked, store: CascadeStore) -> None:
        if call.options.limit is not None and store.record(_LEFT_OUT) is None:
            num_left = self._rows_left(call, checked).count()
            store.put(_LEFT_OUT, str(max(0, num_left - store.rows().count())))

    def _rows_left(self, call: JobCall, checked: Checked) -> "DataFrame":
        remaining = Remaining(call.table, call.options, checked)
        return remaining.left(Batch(rows=checked.source.rows), remaining.done_if_any())

    def _forecast(self) -> Assessment:
        large = without_output(self._options)
        small = without_output(self._small)
        return pilot(self._spark, large, small, self._terminal, promise=self._promise, answers=self._answers)

    def _draw(self, store: CascadeStore, num_rows: int, checked: Checked, number: int) -> Draw:
        """Return the draw of the epoch, which is recorded before any row is answered."""
        if (text := store.record(DRAW)) is None:
            share = self._options.cascade_sample
            has_pilot = share is None or comes_first(num_rows, self._small.engine)
            draw = Draw(
                seed=new_seed(),
                rows=num_rows,
                agree=self._promise.agree,
                confidence=self._promise.confidence,
                sample_share=share or self._promise.default_sample_share(num_rows),
                pilot_share=pilot_share(num_rows) if has_pilot else 0.0,
                spec_hash=checked.spec.hash,
                manifest_digest=manifest_digest(store.rows()),
                number=number,
            )
            text = store.put(DRAW, draw.to_json())
        return Draw.from_json(text)

    def _certified(self) -> Certified:
        """Return what the output's spec holds of the cascade. Raise ``JobError`` if the small engine cannot answer."""
        options = self._small
        call = EngineCall(spark=self._spark, options=options, terminal=self._terminal, run_id=new_run_id())
        source = input_of(call)
        self._say(f"of the small model {self._models[0]} and the large model {self._models[1]}")
        _, reply = check_engine(call, rows_where(source.rows, options.where), 0)
        small = AnnotationSpec.of(reply, source=None, generation=options.generation, time_zone=None)
        return Certified(
            model=self._models[1],
            spec={
                "small": {name: small.values[name] for name in _of_model(small.values)},
                **asdict(self._promise),
                "fields": list(options.agree_fields),
                "tolerance": options.agree_tolerance,
            },
        )

    def _call(self, options: JobOptions) -> JobCall:
        output = (
            HadoopFiles(self._spark).qualified(options.output) if is_path(options.output) else options.output
        )
        table = open_table(self._spark, output)
        return JobCall(
            spark=self._spark, options=options, terminal=self._terminal, table=table, run_id=new_run_id()
        )

    def _say(self, text: str) -> None:
        self._terminal.say("Cascade", text)


def _is_done(summary: Summary) -> bool:
    """Tell whether all rows of the epoch are in the output."""
    return summary.complete or (summary.rows_left is not None and summary.rows_left == summary.rows_left_out)


def _others(store: CascadeStore, num_others: int) -> dict[str, int]:
    """Return the counts of the input's rows outside of the epoch."""
    left_out = int(store.record(_LEFT_OUT) or 0)
    return {"rows_skipped": max(0, num_others - left_out), "rows_left_out": left_out}


def run_job(spark: "SparkSession", options: JobOptions, terminal: Terminal) -> Summary | None:
    """Run a job, or its cascade, as ``AnnotationJob.run`` does."""
    if options.cascade_reset and options.cascade is None:
        raise JobError(
            "--cascade-reset begins a cascade's draws again; give it with --cascade, or leave it out"
        )
    kind = AnnotationJob if options.cascade is None else CascadeJob
    return kind(spark, options, terminal).run()


def _of_model(values: Mapping[str, Any]) -> list[str]:
    return [name for name in values if name in ("model", "engine") or name.startswith("vllm.")]
