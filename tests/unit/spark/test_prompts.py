"""Templates and columns, by only a schema: no JVM runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from pipemax_spark.job.option_values import read_names
from pipemax_spark.request.prompts import (
    PromptSource,
    TemplatePart,
    parse_template,
    resolve_column,
    resolve_names,
)
from pipemax_spark.spark.sql import quoted, split_names

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
    assert not PromptSource(template="{text} {day} {wall} {visit.n}").depends_on_time_zone(TIMES)
    assert not PromptSource(messages_column="chat").depends_on_time_zone(TIMES)


def _struct(*names: str, **structs: StructType) -> StructType:
    fields = [StructField(name, StringType()) for name in names]
    return StructType([*fields, *(StructField(name, kind) for name, kind in structs.items())])


@pytest.mark.parametrize(
    ("name", "schema", "expression"),
    [
        ("a.b", _struct("a.b"), "`a.b`"),
        ("a.b", _struct("a.b", a=_struct("c")), "`a.b`"),
        ("a.b", _struct("a.b", a=_struct("b")), "`a`.`b`"),
        ("`a.b`", _struct("a.b", a=_struct("b")), "`a.b`"),
        ("`a`.`b`", _struct("a.b", a=_struct("b")), "`a`.`b`"),
        ("a.b.c", _struct(a=_struct("b.c")), "`a`.`b.c`"),
        ("a.b.c", _struct(**{"a.b": _struct("c")}), "`a.b`.`c`"),
        ("c`d", _struct("c`d"), "`c``d`"),
        ("`c``d`", _struct("c`d"), "`c``d`"),
        ("`q`", _struct("`q`"), "```q```"),
        ("A.B", _struct("a.b"), "`a.b`"),
        (" ", _struct(" "), "` `"),
        ("x!r", _struct("x!r"), "`x!r`"),
        ("x:3", _struct("x:3"), "`x:3`"),
    ],
)
def test_a_name_means_a_field_of_a_struct_then_a_column_and_in_backticks_what_it_says(
    name: str, schema: StructType, expression: str
) -> None:
    assert resolve_column(name, schema)[0] == expression
    assert parse_template(f"<{{{name}}}>", schema)[1] == TemplatePart(column=expression)


NAMES = st.text(
    st.one_of(st.sampled_from(".`{}!:, '\"\\#%$@[]()ab_-=;\n\t"), st.characters(exclude_categories=("Cs",))),
    min_size=1,
    max_size=8,
)


@given(st.lists(NAMES, min_size=1, max_size=6, unique_by=str.lower), st.data())
def test_quoted_names_lead_to_their_columns_and_fields_whatever_they_are_called(
    names: list[str], data: st.DataObject
) -> None:
    inner = _struct(*names)
    schema = StructType([*inner.fields, StructField("`s.t`", inner)])
    name = data.draw(st.sampled_from(names))
    for path in ((name,), ("`s.t`", name)):
        expression = ".".join(map(quoted, path))
        if "`s.t`" not in names:
            assert resolve_column(expression, schema)[0] == expression
            assert parse_template(f"{{{{{{{expression}}}}}}}", schema) == [
                TemplatePart(text="{"),
                TemplatePart(column=expression),
                TemplatePart(text="}"),
            ]
    listed = ",".join(map(quoted, names))
    assert resolve_names(read_names(listed), schema) == resolve_names(read_names(names), schema) == names
    if not set(name) & set("`{}.") and name == name.strip():
        assert resolve_column(name, schema)[0] == quoted(name)
        assert parse_template(f"{{{name}}}", schema) == [TemplatePart(column=quoted(name))]
    assert split_names(listed, ",") == names
