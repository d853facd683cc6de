"""Templates and columns, by only a schema: no JVM runs."""

import pytest
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pipemax_spark.errors import JobError
from pipemax_spark.prompts import PromptSource, TemplatePart, parse_template, resolve_names

SCHEMA = StructType(
    [
        StructField("id", LongType()),
        StructField("Body Text", StringType()),
        StructField("author", StructType([StructField("name", StringType())])),
        StructField("tags", ArrayType(StringType())),
    ]
)


def test_a_template_is_split_into_text_and_columns() -> None:
    assert parse_template("{{x}} {body text}: {author.name}", SCHEMA) == [
        TemplatePart(text="{"),
        TemplatePart(text="x}"),
        TemplatePart(text=" "),
        TemplatePart(column="`Body Text`"),
        TemplatePart(text=": "),
        TemplatePart(column="`author`.`name`"),
    ]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{bodytext}", r"no column 'bodytext'\. Did you mean 'Body Text'\?"),
        ("{author.nme}", "no column 'nme'"),
        ("no column", "names no column"),
        ("{", r"Single '\{' .*; write \{\{ and \}\} for braces"),
        ("{id:>3}", "has a format or conversion"),
        ("{id!r}", "has a format or conversion"),
        ("{}", "no column ''"),
    ],
)
def test_a_wrong_template_is_refused_with_the_remedy(template: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        parse_template(template, SCHEMA)


def test_exactly_one_source_of_prompts_is_required() -> None:
    with pytest.raises(JobError, match="none of them was given"):
        PromptSource()
    with pytest.raises(JobError, match="prompt-column and template were given"):
        PromptSource(prompt_column="a", template="{b}")


def test_id_columns_are_columns_of_the_table_itself() -> None:
    assert resolve_names(["ID"], SCHEMA) == ["id"]
    with pytest.raises(JobError, match="is a field of a struct"):
        resolve_names(["author.name"], SCHEMA)


def _message(content: DataType, **more: DataType) -> StructType:
    kinds = {"role": StringType(), "content": content, **more}
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


TIMES = StructType(
    [
        StructField("text", StringType()),
        StructField("day", DateType()),
        StructField("wall", TimestampNTZType()),
        StructField("at", TimestampType()),
        StructField("visit", StructType([StructField("at", TimestampType()), StructField("n", LongType())])),
        StructField("visits", ArrayType(StructType([StructField("at", TimestampType())]))),
        StructField("by_name", MapType(StringType(), TimestampType())),
        StructField("chat", ArrayType(_message(StringType(), at=TimestampType()))),
        StructField("odd_chat", ArrayType(_message(TimestampType()))),
    ]
)


@pytest.mark.parametrize(
    "source",
    [
        PromptSource(prompt_column="AT"),
        PromptSource(template="{text} at {at}"),
        PromptSource(template="{visit}"),
        PromptSource(template="{visit.at}"),
        PromptSource(template="{visits}"),
        PromptSource(template="{by_name}"),
        PromptSource(messages_column="odd_chat"),
    ],
)
def test_a_prompt_made_of_a_timestamp_depends_on_the_time_zone(source: PromptSource) -> None:
    assert source.depends_on_time_zone(TIMES)


@pytest.mark.parametrize(
    "source",
    [
        PromptSource(prompt_column="text"),
        PromptSource(template="{text} {day} {wall} {visit.n}"),
        PromptSource(messages_column="chat"),
    ],
)
def test_a_prompt_without_a_timestamp_does_not_depend_on_the_time_zone(source: PromptSource) -> None:
    assert not source.depends_on_time_zone(TIMES)
