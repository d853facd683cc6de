"""Read which column holds the right answer of what: of the annotation, or of each question about a row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.executor.questions import Question
from pipemax_spark.executor.response_format import load_schema
from pipemax_spark.request.questions import ANNOTATION

GoldColumn = str | Mapping[str, str] | None
"""A column, or with questions a column for some of them, by the question's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """A column of right answers, and the answers that are compared with it."""

    column: str
    """The input's column."""
    answers: str
    """The output's column of answers: the annotation, or a question's column."""
    json_property: str | None
    """The property of the JSON answers that is compared; None for the whole text."""

    @property
    def question(self) -> str | None:
        return None if self.answers == ANNOTATION else self.answers


def read_gold_columns(values: Sequence[str]) -> GoldColumn:
    """Return the column, or a mapping if the texts are ``question=column``. ``JobError`` says what is wrong."""
    if len(values) == 1 and "=" not in values[0]:
        return values[0]
    columns: dict[str, str] = {}
    for value in values:
        question, separator, column = (part.strip() for part in value.partition("="))
        if not separator:
            raise JobError(
                f"gold-column {value!r} names no question; with several, write --gold-column 'question=column' for each"
            )
        if question in columns:
            raise JobError(
                f"gold-column: question {question!r} has two columns, {columns[question]!r} and {column!r}"
            )
        columns[question] = column
    return columns


def golds_of(
    gold_column: GoldColumn, generation: GenerationSpec, questions: Sequence[Question]
) -> tuple[Gold, ...]:
    """Return what is compared with what. ``JobError`` says what cannot be compared."""
    if not gold_column:
        return ()
    if not questions:
        if not isinstance(gold_column, str):
            raise JobError(
                f"gold-column names {_listed(gold_column)} as questions, and the job asks none (--ask); "
                "name the column only"
            )
        wanted = _compared_property([gold_column], generation, f"gold-column {gold_column!r}")
        return (Gold(column=gold_column, answers=ANNOTATION, json_property=wanted),)
    names = {question.name: question for question in questions}
    if isinstance(gold_column, str):
        raise JobError(
            f"gold-column {gold_column!r} names no question; with --ask, name a column for each question that has one: "
            f"--gold-column '{questions[0].name}={gold_column}'"
        )
    if unknown := [name for name in gold_column if name not in names]:
        raise JobError(f"gold-column: no question is named {unknown[0]!r}; there are {_listed(names)}")
    return tuple(_gold_of_question(names[name], column) for name, column in gold_column.items())


def _gold_of_question(question: Question, column: object) -> Gold:
    if not isinstance(column, str) or not column:
        raise JobError(f"gold-column: question {question.name!r} has {column!r}; give the name of a column")
    option = f"gold-column '{question.name}={column}'"
    # The question's column bears its name, so that the input's cannot.
    wanted = _compared_property([column, question.name], question.generation, option)
    return Gold(column=column, answers=question.name, json_property=wanted)


def _compared_property(names: Sequence[str], generation: GenerationSpec, option: str) -> str | None:
    """Return the first property of these names; None if the answer is a choice, which itself is compared."""
    if generation.choice:
        return None
    text = generation.response_format
    properties = list(load_schema(text).get("properties", {})) if text else []
    for name in names:
        if name in properties:
            return name
    if len(names) > 1 and len(properties) == 1:
        return str(properties[0])
    raise JobError(
        f"{option} is compared with the property of that name in --response-format, which has "
        f"{', '.join(properties) or 'none'}"
    )


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names))
