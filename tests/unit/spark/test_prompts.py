"""Templates and columns, by a schema alone: no JVM runs."""

import pytest
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

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


def test_a_template_s_parts() -> None:
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
def test_a_wrong_template_is_told_with_its_remedy(template: str, told: str) -> None:
    with pytest.raises(JobError, match=told):
        parse_template(template, SCHEMA)


def test_exactly_one_source_of_prompts() -> None:
    with pytest.raises(JobError, match="none of them was given"):
        PromptSource()
    with pytest.raises(JobError, match="prompt-column and template were given"):
        PromptSource(prompt_column="a", template="{b}")


def test_id_columns_are_columns_of_the_table_itself() -> None:
    assert resolve_names(["ID"], SCHEMA) == ["id"]
    with pytest.raises(JobError, match="is a field of a struct"):
        resolve_names(["author.name"], SCHEMA)
