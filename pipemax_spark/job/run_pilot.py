"""The pilot inside a run of a cascade: some 300 rows that both models answer before the sample share is chosen.

Its rows keep the large answer and are never sampled, so what they decide takes nothing from the promise. The pilot
comes first where it can save a long small pass, and otherwise after the small pass, where no engine has to be started
for it. What it decides is recorded once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import KEEP_NONE
from pipemax_spark.cascade.pilot import Outlook, assess, choose_sample_share, forecast, of_all
from pipemax_spark.job.cascade_answers import ComparedAnswer
from pipemax_spark.job.cascade_phases import Phases
from pipemax_spark.job.cascade_rows import CascadeRows, pilot_rows
from pipemax_spark.options import JobOptions
from pipemax_spark.report.summary import Summary
from pipemax_spark.report.time_accounts import START_UP
from pipemax_spark.rows.checked import Checked
from pipemax_spark.storage.cascade_store import CascadeStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FIRST_ABOVE_ROWS = 100_000
"""At 100 rows per second the small pass takes a quarter of an hour, as long as several starts of engines."""
ROWS, SMALL, LABELS = "pilot", "pilot_small", "pilot_labels"
"""The parts of an epoch's store that belong to the pilot."""
_RECORD = "pilot"


def comes_first(rows: int, small_engine: Mapping[str, Any]) -> bool:
    """Tell whether the pilot comes before the small pass over so many rows, which it can then refuse.

    For that the large engine and the small one again start once more, which an endpoint does not.
    """
    return rows > FIRST_ABOVE_ROWS or "endpoint" in small_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the small model costs, as shares of the large model's time for all rows."""

    ratio: float = 0.0
    starts_share: float = 0.0

    @classmethod
    def of(cls, small: Summary, large: Summary, *, rows: int) -> Self:
        """Return the cost by the pilot's two jobs; 0 if an earlier run has done one, because its time is not known."""
        if not small.working_rows_per_s or not large.working_rows_per_s:
            return cls()
        starts_s = sum(one.time_account_s.get(START_UP, 0.0) / max(1, one.engines) for one in (small, large))
        return cls(
            ratio=large.working_rows_per_s / small.working_rows_per_s,
            starts_share=starts_s * large.working_rows_per_s / rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the pilot has decided."""

    draw: Draw
    """With the sample share that the pilot's rows recommend."""
    outlook: Outlook
    sentence: str
    rows: int
    """Of the pilot, whose large answers are final."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**(values | {"draw": Draw(**values["draw"]), "outlook": Outlook(values["outlook"])}))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class RunPilot:
    """The pilot of one draw."""

    def __init__(
        self,
        store: CascadeStore,
        draw: Draw,
        options: JobOptions,
        answers: Sequence[ComparedAnswer],
        phases: Phases,
        checked: Checked,
    ) -> None:
        """``options`` are those of the job that fills the output, as it was ``checked``."""
        self._store = store
        self._draw = draw
        self._options = options
        self._answers = answers
        self._phases = phases
        self._checked = checked

    def before_small_pass(self) -> Decision:
        """Have both models answer the pilot, and decide, unless that has been done."""
        if (decision := self._decided()) is not None:
            return decision
        self._write_rows()
        small = self._phases.small(self._store, ROWS, SMALL, says="first, the small model answers the pilot")
        large = self._large()
        return self._decide(self._store.read(SMALL), Cost.of(small, large, rows=self._draw.rows))

    def after_small_pass(self) -> Decision:
        """Have the large model answer the pilot, likewise. What the small model costs is spent, and counts no more."""
        if (decision := self._decided()) is not None:
            return decision
        self._write_rows()
        self._large()
        return self._decide(self._store.read("small"), Cost())

    def _write_rows(self) -> None:
        if not self._store.exists(ROWS):
            self._store.write(ROWS, pilot_rows(self._store.rows(), self._draw, self._checked.id_columns))

    def _large(self) -> Summary:
        return self._phases.large(
            self._store, ROWS, LABELS, self._checked, says="first, the large model answers the pilot"
        )

    def _decided(self) -> Decision | None:
        text = self._store.record(_RECORD)
        return None if text is None else Decision.from_json(text)

    def _decide(self, small: "DataFrame", cost: Cost) -> Decision:
        """Choose the sample share, say whether the cascade pays, and record both, if no other run has done so."""
        labels = self._store.read(LABELS)
        rows = CascadeRows(self._options, rows=self._store.read(ROWS), small=small, labels=labels)
        labelled = [[one.row for one in of_row] for of_row in rows.labelled(self._draw, self._answers)]
        of_answers = list(zip(*labelled, strict=True))
        fixed = self._options.cascade_sample
        draws = [
            self._draw.after_pilot(fixed or choose_sample_share(self._draw, rows)) for rows in of_answers
        ]
        # The answer of which the fewest rows are kept decides for all.
        draw, _ = min(zip(draws, of_answers, strict=True), key=lambda one: forecast(*one).middle)
        said = [
            assess(draw, rows, cost_ratio=cost.ratio, starts_share=cost.starts_share) for rows in of_answers
        ]
        names = [one.column for one in self._answers]
        of_row = of_all(names, said) if self._answers[0].is_question else said[0]
        decision = Decision(draw=draw, outlook=of_row.outlook, sentence=of_row.sentence, rows=len(labelled))
        return Decision.from_json(self._store.put(_RECORD, decision.to_json()))

    def write_answers(self, decision: Decision, models: tuple[str, str]) -> None:
        """Write down the pilot's large answers as all that is known, where no row keeps a small one."""
        if self._store.exists("answers"):
            return
        small, labels = self._store.read(SMALL), self._store.read(LABELS)
        rows = CascadeRows(self._options, rows=self._store.rows(), small=small, labels=labels)
        nothing = [replace(certify(decision.draw, ()), cut=KEEP_NONE)] * len(self._answers)
        checked = self._checked
        self._store.write(
            "answers",
            rows.answered(nothing, self._answers, checked.schema, checked.spec.hash, models=models),
        )
