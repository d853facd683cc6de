"""Turn over every setting of Spark that can change a value's text: a prompt stays, or its spec changes."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, DataType, DateType, StructType, UserDefinedType

from pipemax.wire import GenerationSpec, PreflightReply
from pipemax_spark.errors import JobError
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.request.questions import read_questions
from pipemax_spark.request.spec import AnnotationSpec
from pipemax_spark.request.value_text import text_of
from pipemax_spark.rows.row_identity import identity
from pipemax_spark.rows.sample import sample_requests
from pipemax_spark.spark.sql import quoted
from tests.spark.spark_work import set_to
from tests.spark.typed_rows import TypedRows, typed_rows

ZONE = "spark.sql.session.timeZone"
ZONED = {
    "at": "timestamp_micros({micros})",
    "visits": "array(named_struct('at', timestamp_micros({micros}), 'x', CAST(NULL AS INT)), NULL)",
    "seen": "map(timestamp_micros({micros}), 1)",
}
"""Columns whose text depends on the time zone, by the SQL of their values."""
COLUMNS = {
    "text": "'a, {n}'",
    "raw": "X'61C3A4'",
    "flag": "{n} = 1",
    "byte": "tinyint({n})",
    "small": "smallint({n})",
    "number": "int({n})",
    "big": "bigint({n})",
    "ratio": "float('0.1') * {n}",
    "double": "element_at(array(double('NaN'), double('-0.0'), 1e300D, 1e-7D), {n})",
    "zero": "CAST(0 AS DECIMAL(20,10))",
    "price": "CAST({n} * -1234567.5 AS DECIMAL(38,18))",
    "whole": "CAST(12345 AS DECIMAL(5,0))",
    "day": "date_from_unix_date(element_at(array(-719893, -141428, 0, 3652059), {n}))",
    "wall": "TIMESTAMP_NTZ'1582-10-10 01:02:03.000004'",
    "pair": "named_struct('d', CAST(0 AS DECIMAL(20,10)), 'x', CAST(NULL AS INT), 'day', date_from_unix_date(-141428))",
    "list": "array(CAST(0 AS DECIMAL(20,10)), NULL)",
    "none": "CAST(array() AS ARRAY<DATE>)",
    "rates": "map('a', CAST(0 AS DECIMAL(20,10)), 'b', NULL)",
    "days": "map(date_from_unix_date(-141428), array(X'61'))",
    "any": "to_variant_object(named_struct('t', timestamp_micros({micros}), 'd', date_from_unix_date(-141428)))",
    "any_time": "CAST(timestamp_micros({micros}) AS VARIANT)",
    "any_day": "CAST(date_from_unix_date(-141428) AS VARIANT)",
    "any_zero": "CAST(CAST(0 AS DECIMAL(20,10)) AS VARIANT)",
    "any_text": "CAST('a' AS VARIANT)",
    "chat": "array(named_struct('role', 'user', 'content', CAST(0 AS DECIMAL(20,10)), 'at', timestamp_micros({micros}),"
    " 'tool_calls', to_variant_object(array(named_struct('t', timestamp_micros({micros}))))))",
}
COMPUTED = ("span", "months", "folded")
"""Columns of types that no Delta table holds."""
MICROS = [1761442200123456, 1761438600000000, -12219638400000000, -62293190400000000]
TEMPLATE = " ".join(f"{name}={{{name}}}" for name in (*COLUMNS, *COMPUTED) if name != "chat")
SOURCES = {
    "template": PromptSource(template=TEMPLATE),
    "times": PromptSource(template=" ".join(f"{name}={{{name}}}" for name in ZONED)),
    "chat": PromptSource(messages_column="chat"),
    "decimals": PromptSource(prompt_column="zero"),
}
QUESTIONS: dict[str, dict[str, str]] = {
    "template": {"q": "{zero} {pair}"},
    "times": {"q": "{at}"},
    "chat": {},
    "decimals": {"q": "{visits} {zero}"},
}
BREAKS = {
    "spark.sql.parquet.binaryAsString": "reads no VARIANT",
    "spark.sql.analyzer.singlePassResolver.enabled": "an analyser that does not know all of Spark's queries yet",
}
"""Settings that are not turned over, and what they break in Spark itself."""
NUMBER = re.compile(r"-?[\d.]+\w*")


def turns(spark: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the settings of Spark that can be changed, with the values to turn them to.

    The rule: each boolean to its other value, each of few words to each of its other words, and the time zone to two
    others. Those left out hold a number, a size, a duration or free text, or say how files are compressed or what is
    logged. Spark tells a setting's words when it refuses a value.
    """
    all_settings = getattr(getattr(spark._jvm.org.apache.spark.sql.internal, "SQLConf$"), "MODULE$")
    entries = all_settings.getConfigEntries().iterator()
    while entries.hasNext():
        entry = entries.next()
        name, default = entry.key(), entry.defaultValueString()
        if (
            name in BREAKS
            or name.lower().endswith(("codec", "level"))
            or not spark.conf.isModifiable(name)
            or NUMBER.fullmatch(default)
        ):
            continue
        now = str(spark.conf.get(name)) if default != "<undefined>" else ""
        if now in ("true", "false"):
            yield name, ["false" if now == "true" else "true"]
        elif name == ZONE:
            yield name, ["Europe/Berlin", "Asia/Kathmandu"]
        else:
            yield name, [value for value in _values_of(spark, name) if value.upper() != now.upper()]


def _values_of(spark: Any, name: str) -> list[str]:
    """Return the values that a setting may have, as far as there are few."""
    before = spark.conf.get(name, None)
    try:
        spark.conf.set(name, "no value of any setting")
    except Exception as error:
        if "'boolean' value" in str(error):
            return ["true", "false"]
        told = re.search(r"should be one of '([^']*)'", str(error))
        return told[1].split(", ") if told is not None else []
    spark.conf.unset(name) if before is None else spark.conf.set(name, before)
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What comes out under some settings."""

    specs: Mapping[str, str]
    """The hash of each source's spec."""
    requests: Mapping[str, Any]
    """Each source's prompts, questions and keys."""
    identities: Any
    """The keys by which rows are found again."""


def outcome(spark: Any, path: str) -> Outcome:
    rows = spark.read.format("delta").load(path)
    wide = rows.withColumns({"span": F.make_dt_interval(*map(F.lit, (1, 2, 3, 4.000005)))})
    wide = wide.withColumn("folded", F.collate("text", "UTF8_LCASE"))
    wide = wide.withColumn("months", F.make_ym_interval(F.lit(1), F.col("number")))
    specs, made = {}, wide
    for source_name, source in SOURCES.items():
        asked = QUESTIONS[source_name]
        columns = RequestColumns(source, questions=read_questions(asked, GenerationSpec()))
        specs[source_name] = AnnotationSpec.of(
            PreflightReply(model="m", model_fingerprint="0", engine={}),
            source=source,
            generation=GenerationSpec(),
            questions=columns.questions,
            time_zone=columns.time_zone(wide),
        ).hash
        known = made.columns
        keyed = columns.add_with_keys(made)
        new = {name: f"{source_name}:{name}" for name in keyed.columns if name not in known}
        made = keyed.withColumnsRenamed(new)
    kept = {f"kept:{name}": F.expr(identity(rows.schema, [name])) for name in rows.columns}
    made = made.withColumns(kept).orderBy("number")
    texts = [name for name in made.columns if ":" in name and "messages" not in name]
    found = made.select(*map(quoted, texts)).collect()
    requests = {name: [row[name] for row in found] for name in texts}
    chat = RequestColumns(SOURCES["chat"])
    requests["chat:messages"] = sorted(map(str, sample_requests(wide, chat, len(MICROS))))
    return Outcome(
        specs=specs,
        requests={name: values for name, values in requests.items() if not name.startswith("kept:")},
        identities={name: values for name, values in requests.items() if name.startswith("kept:")},
    )


def fault(spark: Any, path: str, chosen: Mapping[str, str], plain: Outcome) -> str | None:
    """Return what is wrong under these settings, or None."""
    try:
        with set_to(spark, chosen):
            found = outcome(spark, path)
    except JobError:
        return None  # in a sentence
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    if found.identities != plain.identities:
        name = next(name for name in plain.identities if found.identities[name] != plain.identities[name])
        return f"{name} was {plain.identities[name]}, is {found.identities[name]}"
    for name, values in plain.requests.items():
        source_name = name.partition(":")[0]
        if found.requests[name] != values and found.specs[source_name] == plain.specs[source_name]:
            return f"{name} was {values}, is {found.requests[name]}"
    changed = {name for name in SOURCES if found.specs[name] != plain.specs[name]}
    if changed and ZONE not in chosen:
        return f"specs changed: {changed}"
    return None


def faults(spark: Any, path: str, chosen: Sequence[tuple[str, str]], plain: Outcome) -> dict[str, str]:
    """Return what is wrong under each of these settings, which are turned over together as long as nothing is."""
    told = fault(spark, path, dict(chosen), plain)
    if told is None:
        return {}
    if len(chosen) == 1:
        return {f"{chosen[0][0]}={chosen[0][1]}": told}
    half = len(chosen) // 2
    return faults(spark, path, chosen[:half], plain) | faults(spark, path, chosen[half:], plain)


@settings(
    max_examples=5 if os.environ.get("PIPEMAX_NIGHT") else 1,
    deadline=None,
    phases=[Phase.generate],  # an example takes seconds, and a smaller one as long
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(typed=typed_rows())
def test_a_value_s_text_is_what_spark_s_cast_makes_of_it_by_default(spark: Any, typed: TypedRows) -> None:
    rows = typed.frame(spark).drop("n")
    odd = "named_struct('a', 1, 'A', map(named_struct('d', 0BD), array()))"
    rows = rows.select("*", F.expr(odd).alias("odd"), F.expr("CAST(NULL AS STRUCT<x: DATE>)").alias("none"))
    casts = [F.col(name).cast("string") for name in rows.columns]
    with set_to(spark, {ZONE: "Asia/Kathmandu", "spark.sql.ansi.enabled": "true"}):
        texts = [text_of(F.col(each.name), each.dataType, "Asia/Kathmandu") for each in rows.schema.fields]
        for row in rows.select(F.array(*texts), F.array(*casts)).collect():
            assert row[0] == row[1]


class Point(UserDefinedType):
    """A type that only Python knows."""

    @classmethod
    def sqlType(cls) -> DataType:  # noqa: N802
        return ArrayType(DateType())

    @classmethod
    def module(cls) -> str:
        return __name__


def test_a_value_of_which_no_text_can_be_made_is_refused_by_its_column(spark: Any) -> None:
    kind = StructType().add("where", ArrayType(Point()))
    for source in (PromptSource(template="{where}"), PromptSource(template="{Where}!")):
        with pytest.raises(
            JobError, match=r"column 'where': of a value of type .*, no text can be made; cast it"
        ):
            source.column(kind, "UTC")


def test_requests_that_differ_in_microseconds_or_in_bytes_that_are_no_text_have_keys_of_their_own(
    spark: Any,
) -> None:
    rows = spark.sql(
        "SELECT element_at(array('h\\uFFFDi', CAST(X'68FF69' AS STRING), CAST(X'68FE69' AS STRING)), n) AS text, "
        "array(named_struct('role', 'user', 'content', 'x', 'at', timestamp_micros(n))) AS chat "
        "FROM VALUES (1), (2), (3) AS given(n)"
    )
    for source in (PromptSource(prompt_column="text"), PromptSource(messages_column="chat")):
        keyed = RequestColumns(source).add_with_keys(rows)
        assert len({row[0] for row in keyed.select(keyed.columns[-1]).collect()}) == 3


def test_the_key_of_a_request_without_such_values_is_what_it_was(spark: Any) -> None:
    keyed = RequestColumns(PromptSource(prompt_column="text")).add_with_keys(
        spark.sql("SELECT 'a b' AS text")
    )
    assert keyed.head()[-1] == md5(b'{"__pipemax_prompt":"a b"}').hexdigest()


TOGETHER = 300


@pytest.mark.long  # settings by Hypothesis
def test_no_setting_of_the_session_changes_a_prompt_under_one_spec(spark: Any, tmp_path: Path) -> None:
    path = f"{tmp_path}/typed"
    columns = ", ".join(f"{{sql}} AS {name}".format(sql=sql) for name, sql in (COLUMNS | ZONED).items())
    rows = [f"SELECT {columns.format(n=n, micros=micros)}" for n, micros in enumerate(MICROS, 1)]
    spark.sql(" UNION ALL ".join(rows)).coalesce(1).write.format("delta").save(path)
    plain = outcome(spark, path)
    turned = dict(turns(spark))
    wrong: dict[str, str] = {}
    for zone in turned.pop(ZONE):  # by itself: it changes specs
        wrong |= faults(spark, path, [(ZONE, zone)], plain)
    rounds = max(map(len, turned.values()))
    for place in range(rounds):
        chosen = [(name, values[place]) for name, values in turned.items() if len(values) > place]
        for start in range(0, len(chosen), TOGETHER):
            wrong |= faults(spark, path, chosen[start : start + TOGETHER], plain)
    assert wrong == {}
