"""Which column of right answers is compared with what, as the command line and Python name it."""

from typing import Any

import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.request.golds import Gold, golds_of, read_gold_columns
from pipemax_spark.request.questions import ANNOTATION, read_questions
from tests.spark.conftest import object_schema

CHOICE = GenerationSpec(choice=("a", "b"))
LABEL = GenerationSpec(response_format=object_schema(label={"type": "string"}, size={"type": "integer"}))
QUESTIONS = read_questions(
    {
        "topic": {"template": "Topic?", "choice": ["a", "b"]},
        "label": {"template": "Label?", "response_format": object_schema(label={"type": "string"})},
        "size": {"template": "Size?", "response_format": object_schema(cm={"type": "integer"})},
        "text": "Why?",
    },
    GenerationSpec(),
)


def test_a_choice_itself_or_the_property_of_the_column_s_name_is_compared() -> None:
    assert golds_of(None, GenerationSpec(), ()) == ()
    assert golds_of("x", CHOICE, ()) == (Gold(column="x", answers=ANNOTATION, json_property=None),)
    assert golds_of("size", LABEL, ()) == (Gold(column="size", answers=ANNOTATION, json_property="size"),)


def test_each_question_has_a_column_and_its_property_may_have_the_question_s_name_or_be_the_only_one() -> (
    None
):
    columns = {"topic": "t", "label": "l", "size": "s"}
    assert golds_of(columns, GenerationSpec(), QUESTIONS) == (
        Gold(column="t", answers="topic", json_property=None),
        Gold(column="l", answers="label", json_property="label"),
        Gold(column="s", answers="size", json_property="cm"),
    )


@pytest.mark.parametrize(
    ("texts", "columns"),
    [
        (["label"], "label"),
        (["topic=t"], {"topic": "t"}),
        (["topic = t", "label=a=b"], {"topic": "t", "label": "a=b"}),
    ],
)
def test_the_command_line_names_a_column_or_a_column_of_each_question(texts: list[str], columns: Any) -> None:
    assert read_gold_columns(texts) == columns


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (
            ["topic=t", "label"],
            "'label' names no question; with several, write --gold-column 'question=column'",
        ),
        (["topic=t", "topic=u"], "question 'topic' has two columns, 't' and 'u'"),
    ],
)
def test_several_columns_need_a_question_each(texts: list[str], reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        read_gold_columns(texts)


@pytest.mark.parametrize(
    ("column", "generation", "questions", "reason"),
    [
        (
            "label",
            GenerationSpec(),
            (),
            "with the property of that name in --response-format, which has none",
        ),
        ("colour", LABEL, (), "which has label, size"),
        ({"topic": "t"}, CHOICE, (), "names 'topic' as questions, and the job asks none"),
        ("t", GenerationSpec(), QUESTIONS, "one: --gold-column 'topic=t'"),
        (
            {"tone": "t"},
            GenerationSpec(),
            QUESTIONS,
            "no question is named 'tone'; there are 'topic', 'label'",
        ),
        ({"topic": 7}, GenerationSpec(), QUESTIONS, "question 'topic' has 7; give the name of a column"),
        ({"text": "t"}, GenerationSpec(), QUESTIONS, "gold-column 'text=t' is compared with the property"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    column: Any, generation: GenerationSpec, questions: Any, reason: str
) -> None:
    with pytest.raises(JobError, match=reason):
        golds_of(column, generation, questions)
