"""Count the outputs of a run that something else than the model ended, and those that only repeated themselves."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.options import JobOptions
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_THINKING = "thinking"
_SHARE_TO_TELL = 0.01
"""Share of outputs in a loop from which on the report names the remedy."""
_LOOKED_AT = 1_000
"""Maximum number of cut outputs in which a loop is looked for."""
_LAST_CHARACTERS = 2_000
_LONGEST_PATTERN, _LEAST_REPEATS, _LEAST_CHARACTERS = 400, 4, 100
_SUGGESTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEnds:
    """How many outputs of a run ended early. A row has one output, or with ``--ask`` one for each question."""

    outputs: int
    by_length: int = 0
    """Cut at ``--max-tokens``."""
    by_repetition: int = 0
    """Ended by ``--stop-repetition``."""
    by_thinking: int = 0
    """Whose thinking took the run's ``--thinking-tokens``, or nearly: the marks around it count too."""
    looping_share: float = 0.0
    """Share of the outputs cut at ``--max-tokens`` that repeated themselves at their end, among those looked at."""

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield what the report says of them: name and text."""
        causes = {
            "cut at --max-tokens": self.by_length,
            "ended by --stop-repetition": self.by_repetition,
            "at --thinking-tokens": self.by_thinking,
        }
        texts = [f"{n:,} ({n / self.outputs:.1%}) {cause}" for cause, n in causes.items() if n]
        if texts:
            yield "Ended early", ", ".join(texts)
        looping = self.looping_share * self.by_length
        if looping > _SHARE_TO_TELL * self.outputs:
            yield (
                "  in a loop",
                f"about {looping:,.0f} of those cut repeat themselves at their end; --stop-repetition {_SUGGESTED} "
                "ends such outputs early, in a run with --new-spec or of another table",
            )


def ends_to_count(rows: "DataFrame", options: JobOptions) -> "Iterator[tuple[str, Column]]":
    """Yield what ``early_ends`` needs counted over all rows: a name, and the expression whose values are counted."""
    from pyspark.sql import functions as F  # noqa: N812

    for column, thinking_tokens in _outputs(options).items():
        fields = rows.select(f"{quoted(column)}.*").columns
        if "finish_reason" in fields:
            yield f"{column} ended by", F.col(f"{quoted(column)}.finish_reason")
        if thinking_tokens is not None and "reasoning_tokens" in fields:
            spent = F.col(f"{quoted(column)}.reasoning_tokens") >= thinking_tokens
            yield f"{column} spent", F.when(spent, F.lit(_THINKING))


def early_ends(
    rows: "DataFrame", options: JobOptions, counts: Mapping[str, Mapping[str, int]]
) -> EarlyEnds | None:
    """Return how many outputs ended early, by the counts of ``ends_to_count``; None if none was generated.

    Reads some of the outputs that were cut, if they are many.
    """
    total: Counter[str] = Counter()
    for column in _outputs(options):
        for name in (f"{column} ended by", f"{column} spent"):
            total.update(counts.get(name, {}))
    outputs = sum(n for reason, n in total.items() if reason != _THINKING)
    if outputs == 0:
        return None
    is_often_cut = total["length"] > _SHARE_TO_TELL * outputs
    return EarlyEnds(
        outputs=outputs,
        by_length=total["length"],
        by_repetition=total["repetition"],
        by_thinking=total[_THINKING],
        looping_share=_looping_share(rows, options) if is_often_cut else 0.0,
    )


def _outputs(options: JobOptions) -> dict[str, int | None]:
    """Return the columns that hold outputs, with the tokens that their thinking may take."""
    asked = {question.name: question.generation.thinking_tokens for question in options.ask}
    return asked or {ANNOTATION: options.generation.thinking_tokens}


def _looping_share(rows: "DataFrame", options: JobOptions) -> float:
    from pyspark.sql import functions as F  # noqa: N812

    looked_at = looping = 0
    for column in _outputs(options):
        fields = rows.select(f"{quoted(column)}.*").columns
        texts = [F.col(f"{quoted(column)}.{name}") for name in ("text", "reasoning") if name in fields]
        end = F.substring(F.coalesce(*texts), -_LAST_CHARACTERS, _LAST_CHARACTERS)
        cut = rows.where(F.col(f"{quoted(column)}.finish_reason") == "length").select(end)
        ends = [row[0] or "" for row in cut.limit(_LOOKED_AT).collect()]
        looked_at, looping = looked_at + len(ends), looping + sum(map(is_in_loop, ends))
    return looping / looked_at if looked_at else 0.0


def is_in_loop(text: str) -> bool:
    """Tell whether a text ends with one pattern, over and over: four times at least, and a hundred characters."""
    for pattern in range(1, _LONGEST_PATTERN + 1):
        length = max(_LEAST_REPEATS * pattern, _LEAST_CHARACTERS)
        if length > len(text):
            return False
        end = text[-length:]
        if end[pattern:] == end[:-pattern]:
            return True
    return False
