"""Ask the large model for some of the sampled rows once more, and count how often it gives the same answer.

Where it does not agree with itself, no small model can agree with it more often: batches of other rows change the
last bits of an engine's sums. The second answers describe that and decide nothing; what is certified and written is
the first answer.
"""

from collections.abc import Sequence

from pipemax_spark.cascade.draw import Draw
from pipemax_spark.job.cascade_answers import ComparedAnswer
from pipemax_spark.job.cascade_facts import AskedAgain
from pipemax_spark.job.cascade_phases import Phases
from pipemax_spark.job.cascade_rows import CascadeRows
from pipemax_spark.rows.checked import Checked
from pipemax_spark.storage.cascade_store import CascadeStore

ROWS, LABELS = "again", "again_labels"
"""The parts of an epoch's store: the rows that are asked again, and the second answers."""
MAX_ROWS = 300
_MAX_SHARE = 0.01
"""Of the epoch's rows: more would cost more than it says."""
FEWEST_ROWS = 20
"""With 20 of 20 equal answers, the share is known to be above 84 % only; of fewer rows nothing is asked again."""


def rows_to_ask(rows: int, sampled_rows: int) -> int:
    """Return how many sampled rows of an epoch with so many rows are asked again."""
    wanted = min(MAX_ROWS, int(_MAX_SHARE * rows), sampled_rows)
    return wanted if wanted >= FEWEST_ROWS else 0


def asked_again(
    store: CascadeStore,
    rows: CascadeRows,
    draw: Draw,
    answers: Sequence[ComparedAnswer],
    phases: Phases,
    checked: Checked,
) -> Sequence[AskedAgain]:
    """Ask the large model for sampled rows of different requests again, and count the same answers of each question.

    They are asked for once, in a job that is resumed as that of the first answers is. Raise ``PhaseEndedError`` if a
    limit ends it.
    """
    wanted = rows_to_ask(draw.rows, store.read("sample").count())
    if not wanted:
        return [AskedAgain()] * len(answers)
    if not store.exists(ROWS):
        store.write(ROWS, rows.drawn_requests(store.read("sample"), draw, wanted))
    what = f"again, the large model answers {store.read(ROWS).count():,} sampled rows"
    phases.large(store, ROWS, LABELS, checked, says=what, computes_each=True)
    return rows.repeated(store.read(LABELS), answers)
