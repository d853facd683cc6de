"""What a cascade compares of a row: its answer, or that of each question, with a score of how sure the small model was.

The score only orders rows; what is promised holds whatever it is worth. Both are Spark expressions over a struct that
holds the row's annotation columns, one for each question and the row's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax.wire import GenerationSpec
from pipemax_spark.cascade.batches import ONE_ANSWER
from pipemax_spark.cascade.equality import Answers, Equality
from pipemax_spark.rows.annotated import ANNOTATION

if TYPE_CHECKING:
    from pyspark.sql import Column

_SUMS_TO_ONE = 0.01
"""How far the probabilities of classes that exclude each other may add up to something else, in half precision."""
_HALF = 0.5
"""From here on a class of a model with several labels per row is one of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedAnswer:
    """An answer of each row that has a threshold of its own."""

    column: str
    """Of the table: a question's, or ``annotation``."""
    generation: GenerationSpec
    equality: Equality

    @property
    def is_question(self) -> bool:
        return self.column != ANNOTATION

    @property
    def name(self) -> str:
        """Its name among the answers of a row."""
        return self.column if self.is_question else ONE_ANSWER

    def score(self, annotations: "Column") -> "Column":
        """Return how sure the model was: null for an error, and without an annotation."""
        from pyspark.sql import functions as F  # noqa: N812

        generation, column = self.generation, annotations[self.column]
        if generation.task == "classify":
            of_labels = F.array_min(
                F.transform(F.map_values(column["probabilities"]), lambda p: F.abs(p - _HALF))
            )
            score = F.when(_excludes(column), column["probability"]).otherwise(of_labels)
        elif generation.task == "score":
            score = F.lit(0.0)  # such a model says nothing of it
        elif generation.choice:
            score = column["probability"]
        elif generation.n > 1:
            score = column["agreement"]
        else:
            score = F.exp(column["logprob_sum"])
            if self.equality.answers is Answers.JSON:
                score = F.coalesce(self._least_sure_field(column["field_probabilities"]), score)
        return F.when(column.isNotNull() & column["error"].isNull(), score.cast("double"))

    def _least_sure_field(self, probabilities: "Column") -> "Column":
        """Return the least probability of a compared field; null if none is known."""
        from pyspark.sql import functions as F  # noqa: N812

        fields = self.equality.fields
        of_fields = F.array(*(F.try_element_at(probabilities, F.lit(name)) for name in fields))
        return F.array_min(of_fields if fields else F.map_values(probabilities))

    def value(self, annotations: "Column") -> "Column":
        """Return what ``equality`` compares, as text: null for an error, and without an annotation."""
        from pyspark.sql import functions as F  # noqa: N812

        column = annotations[self.column]
        match self.generation.task:
            case "classify":
                labels = F.map_keys(F.map_filter(column["probabilities"], lambda _, p: p >= _HALF))
                value = F.to_json(
                    F.struct(
                        _excludes(column).alias("excludes"),
                        column["label"].alias("label"),
                        F.coalesce(F.array_sort(labels), F.array().cast("array<string>")).alias("labels"),
                    )
                )
            case "score":
                value = column["score"].cast("string")
            case _:
                value = column["text"]
        return F.when(column["error"].isNull(), value)


def row_score(answers: Sequence[ComparedAnswer], annotations: "Column") -> "Column":
    """Return how sure the model was of the row's least sure answer; null if one of them has no score."""
    from pyspark.sql import functions as F  # noqa: N812

    scores = [answer.score(annotations) for answer in answers]
    if len(scores) == 1:
        return scores[0]
    return F.when(~F.greatest(*(score.isNull() for score in scores)), F.least(*scores))


def _excludes(column: "Column") -> "Column":
    """Return whether the classes exclude each other: their probabilities then add up to 1."""
    from pyspark.sql import functions as F  # noqa: N812

    total = F.aggregate(F.map_values(column["probabilities"]), F.lit(0.0), lambda sum_, p: sum_ + p)
    return F.coalesce(F.abs(total - 1) <= _SUMS_TO_ONE, F.lit(True))  # an endpoint tells the label's only
