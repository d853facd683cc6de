"""Inputs that made other tools lose, double or change rows: docs/reference/strange-inputs.md says what comes out."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from tests.spark.spark_work import set_to
from tests.spark.strange_bench import Bench, four, request

pytestmark = pytest.mark.long  # each kind has a faster test of its own in make test
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "strange-inputs.md"

HEADER = {"header": "true"}
TORN = '{"id": 1, "text": "one"}\n{"id": 2, "text": "tw\n{"id": 3, "text": "three"}\n'
OF_JSON = {"input_format": "json", "id_columns": "id", "prompt_column": "text"}


def empty_partition_value(bench: Bench) -> str:
    bench.partitioned("id BIGINT, text STRING, lang STRING", by="lang")
    source = bench.table(four("element_at(array('', NULL, 'a/b:c=%20', ' x '), int(id) + 1) AS lang"))
    return bench.job(source, runs=3)


def mostly_without_prompt(bench: Bench) -> str:
    lines = "".join(f"{i},{'word' if i == 7 else ''}\n" for i in range(200))
    return bench.job(bench.file("mostly.csv", "id,text\n" + lines), input_option=HEADER)


def empty_file(bench: Bench) -> str:
    try:
        return bench.job(bench.file("zero.jsonl", ""), input_format="json", prompt_column="text")
    except Exception as error:  # no output is made
        return (
            "no output is made"
            if "PATH_NOT_FOUND" in str(error) or "not a Delta" in str(error)
            else repr(error)
        )


def odd_directories(bench: Bench) -> str:
    first = bench.job(bench.file("a [b]/t.csv", "id,text\n1,one\n"), input_option=HEADER)
    second = bench.job(
        bench.file("10:30/t.csv", "id,text\n1,one\n"),
        input_option=HEADER,
        output=str(bench.directory / "o2"),
    )
    return first if first == second else f"{first}; {second}"


def earlier_version(bench: Bench) -> str:
    source = bench.table("SELECT id, concat('p ', id) AS text FROM range(2)")
    bench.spark.sql("SELECT 9L AS id, 'later' AS text").write.format("delta").mode("append").save(source)
    return bench.job(source, input_option={"versionAsOf": "0"})


def microseconds(bench: Bench) -> str:
    sql = "SELECT id, concat('p ', id) AS text, timestamp_micros(1700000000123456 + id) AS at FROM range(4)"
    with set_to(bench.spark, {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS"}):
        return bench.job(bench.view(sql), runs=3)


def doubled_hour(bench: Bench) -> str:
    with set_to(bench.spark, {"spark.sql.session.timeZone": "Europe/Berlin"}):
        bench.partitioned("text STRING, at TIMESTAMP", by="at")
        return bench.job(bench.view("SELECT 'a' AS text, timestamp'2025-10-26T01:30:00Z' AS at"), runs=3)


def without_ansi(bench: Bench) -> str:
    sql = "SELECT 'a' AS text, named_struct('max_tokens', 4294967299L) AS o"
    with set_to(bench.spark, {"spark.sql.ansi.enabled": "false"}):
        return bench.job(bench.view(sql), overrides_column="o")


def decimal_zero(bench: Bench) -> str:
    sql = "SELECT CAST(0 AS DECIMAL(20,10)) AS d, array(CAST(0 AS DECIMAL(20,10))) AS a"
    on, off = (
        bench.under({"spark.sql.ansi.enabled": mode}, sql, template="{d} {a}") for mode in ("true", "false")
    )
    return "one prompt" if on == off else f"{on}, {off}"


def other_settings(bench: Bench) -> str:
    settings = {
        "spark.sql.legacy.timeParserPolicy": "LEGACY",
        "spark.sql.legacy.castComplexTypesToString.enabled": "true",
        "spark.sql.session.timeZone": "Asia/Kathmandu",
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
    }
    sql = (
        "SELECT date_from_unix_date(-141428) AS d, array(1, NULL) AS a, "
        "to_variant_object(named_struct('t', timestamp_micros(1))) AS v"
    )
    plain, other = (
        bench.texts(sql, template="{d} {a} {v}"),
        bench.under(settings, sql, template="{d} {a} {v}"),
    )
    return "one prompt" if plain == other else f"{plain}, {other}"


def two_text_parts(bench: Bench) -> str:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]
    seen = []
    for others in ("", request(2, picture)):
        path = bench.file(f"batch{len(seen)}.jsonl", request(1, parts) + others)
        bench.job(path, input_format="openai-batch", runs=1)
        seen.append(bench.answers()[0])
    return "one prompt" if seen[0] == seen[1] else str(seen)


def binary_files(bench: Bench) -> str:
    for name in ("a b.png", "a%20b.png"):
        bench.file(f"images/{name}", name)
    files = bench.spark.read.format("binaryFile").load(str(bench.directory / "images"))
    files.selectExpr("path", "'what?' AS text").createOrReplaceTempView("pictures")
    of_path = bench.texts("SELECT * FROM pictures ORDER BY path", prompt_column="text", image_column="path")
    files.selectExpr("path", "content", "'what?' AS text").createOrReplaceTempView("pictures")
    of_bytes = bench.texts(
        "SELECT * FROM pictures ORDER BY path", prompt_column="text", image_column="content"
    )
    return "each its own" if of_path == of_bytes and len(set(of_path)) == 2 else f"{of_path}, {of_bytes}"


def skipped_merge(bench: Bench) -> str:
    source = bench.table("SELECT id, concat('p ', id) AS text FROM range(3)")
    options = {"incremental": True, "skip_changes": True, "id_columns": "id", "runs": 1}
    bench.job(source, **options)
    bench.spark.sql(
        f"MERGE INTO delta.`{source}` AS t USING (SELECT id, 'new' AS text FROM range(2, 5)) AS s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )
    return bench.job(source, **options)


def long_partition_value(bench: Bench) -> str:
    bench.partitioned("text STRING, lang STRING", by="lang")
    return bench.job(bench.view("SELECT 'a' AS text, repeat('x', 300) AS lang"))


NIGHT = {"incremental": True, "id_columns": "id", "runs": 1}


def append(bench: Bench, source: str, first: int, last: int) -> None:
    rows = bench.spark.sql(f"SELECT id, concat('p ', id) AS text FROM range({first}, {last})")
    rows.write.format("delta").mode("append").save(source)


def missed_nights(bench: Bench) -> str:
    """Return an input of which files that were appended since the first night are gone."""
    source = bench.table("SELECT id, concat('p ', id) AS text FROM range(2)")
    bench.job(source, **NIGHT)
    append(bench, source, 2, 4)
    append(bench, source, 4, 6)
    with set_to(bench.spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        bench.spark.sql(f"OPTIMIZE delta.`{source}`")
        bench.spark.sql(f"VACUUM delta.`{source}` RETAIN 0 HOURS")
    return source


def missed_nights_rescanned(bench: Bench) -> str:
    source = missed_nights(bench)
    bench.job(source, **NIGHT, rescan=True)
    append(bench, source, 6, 7)
    return bench.job(source, **NIGHT)


def skipped_update(bench: Bench) -> str:
    source = bench.table("SELECT id, concat('p ', id) AS text FROM range(3)")
    bench.job(source, **NIGHT)
    bench.spark.sql(f"UPDATE delta.`{source}` SET text = 'new' WHERE id = 1")
    append(bench, source, 3, 5)
    bench.job(source, **NIGHT, skip_changes=True)
    append(bench, source, 5, 6)
    return bench.job(source, **NIGHT)


REAL: dict[str, Any] = {
    "engine": {"model": str(PAGE.parents[2] / "examples" / "model")},
    "engine_python": sys.executable,
}
"""For a job that the engine's environment refuses before an engine starts."""


VLLM = {
    **REAL,
    "engine": {
        **REAL["engine"],
        "policy": "vllm",
        "dtype": "float32",
        "max_model_len": 512,
        "cpu_kv_gib": 0.25,
    },
}
"""For a job that is answered by real vLLM."""


def with_pattern(pattern: str) -> dict[str, Any]:
    """Return a response format with a text of this pattern."""
    return {"type": "object", "properties": {"t": {"type": "string", "pattern": pattern}}, "required": ["t"]}


def many_choices(bench: Bench) -> str:
    choices = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    asked = {"kind": {"template": "Which?", "choice": choices, "logprobs": True}}
    return bench.job(bench.view("SELECT 'a' AS text"), ask=asked, **REAL)


def unread_tool_calls(bench: Bench) -> str:
    sql = (
        "SELECT array(named_struct('role', 'user', 'content', 'Package: vim', 'tool_calls', "
        """if(id = 1, '[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]', NULL))) AS chat """
        "FROM range(2)"
    )
    return bench.job(bench.view(sql), messages_column="chat", **VLLM)


def array_of_objects(bench: Bench) -> str:
    item = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}
    array = {"type": "array", "items": {**item, "additionalProperties": False}, "maxItems": 3}
    schema = {
        "type": "object",
        "properties": {"items": array},
        "required": ["items"],
        "additionalProperties": False,
    }
    source = bench.view("SELECT id, concat('Package: p', id) AS text FROM range(3)")
    return bench.job(source, response_format=schema, **{**VLLM, "max_tokens": 120})


CASES: dict[str, Callable[[Bench], str]] = {
    "an empty text in a partition column, three runs": empty_partition_value,
    "a view with `uuid()`": lambda bench: bench.job(
        bench.view("SELECT uuid() AS id, concat('p ', id) AS text FROM range(4)")
    ),
    "the same view, with the other column as id": lambda bench: bench.job(
        bench.view("SELECT uuid() AS u, concat('p ', id) AS text FROM range(4)"), id_columns="text"
    ),
    "half of a surrogate pair in a batch file": lambda bench: bench.job(
        bench.file("batch.jsonl", request(1, "fine") + request(2, "half of a pair: \ud83c")),
        input_format="openai-batch",
    ),
    "`max_tokens` 3,000,000,000 in one row of four": lambda bench: bench.job(
        bench.view(four("named_struct('max_tokens', if(id = 1, 3000000000L, 5L)) AS o")), overrides_column="o"
    ),
    "`max_tokens` NaN in one row of four": lambda bench: bench.job(
        bench.view(four("named_struct('max_tokens', if(id = 1, double('NaN'), 5d)) AS o")),
        overrides_column="o",
    ),
    "`max_tokens` 'n/a' in one row of four": lambda bench: bench.job(
        bench.view(four("named_struct('max_tokens', if(id = 1, 'n/a', '5')) AS o")), overrides_column="o"
    ),
    "the same in the UDF's options": lambda bench: bench.udf(
        "SELECT concat('p ', id) AS text, named_struct('max_tokens', if(id = 1, 'n/a', '5')) AS options FROM range(4)"
    ),
    "columns named `a.b` and ``c`d``": lambda bench: bench.job(bench.view(four("1 AS `a.b`", "2 AS `c``d`"))),
    "the same in `annotate()`": lambda bench: bench.annotated(
        four("1 AS `a.b`", "2 AS `c``d`", "'mine' AS __pipemax_prompt")
    ),
    "199 of 200 rows without a prompt": mostly_without_prompt,
    "a torn line in a JSON file": lambda bench: bench.job(bench.file("torn.jsonl", TORN), **OF_JSON),
    'the same with `bad_lines="drop"`': lambda bench: bench.job(
        bench.file("torn.jsonl", TORN), **OF_JSON, bad_lines="drop"
    ),
    "a JSON array over several lines": lambda bench: bench.job(
        bench.file("array.json", json.dumps([{"id": 1, "text": "one"}, {"id": 2, "text": "two"}], indent=2)),
        id_columns="id",
    ),
    "an open quote in a CSV file": lambda bench: bench.job(
        bench.file("open.csv", 'id,text\n1,one\n2,"two\n3,three\n4,four\n'), input_option=HEADER
    ),
    "a CSV file in latin-1 (and a warning)": lambda bench: bench.job(
        bench.file("latin1.csv", "id,text\n1,Größe und Gemüse\n".encode("latin-1")), input_option=HEADER
    ),
    "a file of 0 bytes": empty_file,
    "files in the directories `a [b]` and `10:30`": odd_directories,
    "a DataFrame as `input`": lambda bench: bench.job(bench.spark.range(1)),
    "`max_tokens='8'`": lambda bench: bench.job(bench.view("SELECT 'a' AS text"), max_tokens="8"),
    "`input_option=['a=b']`": lambda bench: bench.job(bench.view("SELECT 'a' AS text"), input_option=["a=b"]),
    "`versionAsOf` 0 of a Delta table with a later version": earlier_version,
    "microseconds, and `outputTimestampType` TIMESTAMP_MILLIS, three runs": microseconds,
    "a partition column with a time in the doubled hour, three runs": doubled_hour,
    "`max_tokens` 4294967299 with ANSI off": without_ansi,
    "a decimal 0 in a template, with ANSI on and off": decimal_zero,
    "a date of 1582, a null in an array and a time within a VARIANT, under other settings": other_settings,
    "two text parts in a request of a batch file, alone and next to a request with an image": two_text_parts,
    "binaryFile's `path` of `a%20b.png` next to `a b.png`": binary_files,
    "a `MERGE` that updates a row and inserts two, then `--incremental --skip-changes`": skipped_merge,
    "an input column named `__pipemax_prompt`, two runs": lambda bench: bench.job(
        bench.view(four("'mine' AS __pipemax_prompt"))
    ),
    "bytes that are no UTF-8 in a conversation": lambda bench: bench.job(
        bench.view(
            "SELECT array(named_struct('role', 'user', 'content', cast(x'68ff69' AS string))) AS chat"
        ),
        messages_column="chat",
    ),
    "the same in the UDF": lambda bench: bench.udf(
        "SELECT array(named_struct('role', 'user', 'content', cast(x'68ff69' AS string))) AS text"
    ),
    "`max_tokens` 2147483648 in a line of a batch file": lambda bench: bench.job(
        bench.file("batch.jsonl", request(1, "fine") + request(2, "more", max_tokens=2147483648)),
        input_format="openai-batch",
    ),
    "300 characters in a partition column": long_partition_value,
    "missed nights, then `OPTIMIZE` and `VACUUM` of the input, then a night": lambda bench: bench.job(
        missed_nights(bench), **NIGHT
    ),
    "the same with `rescan=True`, then another night": missed_nights_rescanned,
    "an `UPDATE`, a night with `--skip-changes`, then one without": skipped_update,
    "a question with 676 choices and `logprobs`": many_choices,
    "a lookahead in a schema's pattern": lambda bench: bench.job(
        bench.view("SELECT 'a' AS text"), response_format=with_pattern("^(?=a)"), **REAL
    ),
    "half of a surrogate pair in a schema's pattern": lambda bench: bench.job(
        bench.view("SELECT 'a' AS text"), response_format=with_pattern(r"^\ud83c$"), **REAL
    ),
    "`tool_calls` in one of two conversations, over a template that does not read them": unread_tool_calls,
    "an array of objects as schema, and 120 tokens": array_of_objects,
}
"""What is given, as the page calls it."""


def rows_of_the_page() -> Iterator[tuple[str, str]]:
    """Yield the cells of the page's table: what was given and what came out."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 2:
            yield cells[0], cells[1]


@pytest.mark.parametrize("name", CASES)
def test_what_comes_out_is_what_the_page_says(
    spark: Any, tmp_path: Path, engine_python: str, name: str
) -> None:
    came_out = CASES[name](Bench(spark, tmp_path, engine_python))
    assert dict(rows_of_the_page()).get(name) == came_out


def test_the_page_has_no_case_that_is_not_run() -> None:
    given = [name for name, _ in rows_of_the_page()]
    assert given[1:] == list(CASES), "the first row is the head"
