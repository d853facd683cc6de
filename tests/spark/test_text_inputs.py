"""Lines of CSV, JSON and batch files that are no rows: none is annotated, and none is lost without a word."""

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.storage.bad_lines import BadLines, checked_rows
from pipemax_spark.storage.hadoop import HadoopFiles, is_remote
from pipemax_spark.storage.sources import read_source
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs

SWALLOWED = "1 record with a quote that is not closed"
FIELDS = "with more or fewer fields than the header"
BEHIND = "with more text behind the JSON value"

BAD: dict[str, tuple[str, str, Mapping[str, str], str, list[str]]] = {
    # case: (file, text, options, what is said, texts that are left with --bad-lines drop)
    "torn line": (
        "a.jsonl",
        '{"id": 1, "text": "one"}\n{"id": 2, "te\n',
        {},
        r"1 line .*'\{\"id\": 2, \"te'",
        ["one"],
    ),
    "no object": (
        "a.jsonl",
        '{"id": 1, "text": "one"}\n7\n',
        {},
        "1 line that cannot be read .*'7'",
        ["one"],
    ),
    "only torn lines": ("a.json", '{"id": 1, "text": "o\n{"id": 2', {}, "2 lines", []),
    "pretty array": (
        "a.json",
        json.dumps([{"id": 1, "text": "one"}], indent=2),
        {},
        r"--input-option multiLine=true",
        [],
    ),
    "pretty object": ("a.json", json.dumps({"id": 1, "text": "one"}, indent=2), {}, "multiLine=true", []),
    "array of lines": ("a.json", '[\n{"id": 1, "text": "one"}\n]', {}, "2 lines .* multiLine=true", ["one"]),
    "torn array": (
        "a.json",
        '[{"id": 1, "text": "one"},\n{"id"',
        {"multiLine": "true"},
        "1 file that cannot",
        [],
    ),
    "two on a line": (
        "a.jsonl",
        '{"id": 1, "text": "one"}{"id": 2, "text": "two"}\n',
        {},
        f"1 line {BEHIND}",
        ["one"],
    ),
    "two and a comma": (
        "a.jsonl",
        '{"id": 1, "text": "{}"},{"id": 2, "text": "b"}',
        {},
        f"1 line {BEHIND}",
        ["{}"],
    ),
    "garbage behind": ("a.jsonl", '{"id": 1, "text": "one"} x\n', {}, f"1 line {BEHIND}", ["one"]),
    "lines as one value": (
        "a.jsonl",
        '{"id": 1, "text": "one"}\n{"id": 2, "text": "two"}\n',
        {"MULTILINE": "True"},
        f"1 file {BEHIND}.*leave multiLine out",
        ["one"],
    ),
    "two arrays": (
        "a.json",
        '[{"id": 1, "text": "one"}]\n[{"id": 2, "text": "two"}]',
        {"multiLine": "true"},
        f"1 file {BEHIND}",
        ["one"],
    ),
    "quote to the end": ("a.csv", 'id,text\n1,one\n2,"two\n3,three\n4,four\n', {}, SWALLOWED, ["one"]),
    "quote to the end of its line": ("a.csv", 'id,text\n1,one\n2,"two', {}, SWALLOWED, ["one"]),
    "quote that is closed rows later": (
        "a.csv",
        'id,text\n1,one\n2,"two\n3,three\n4,"four"\n5,five\n',
        {},
        SWALLOWED,
        ["one", "five"],
    ),
    "quote to the end, in the first of two columns": (
        "a.csv",
        'text,id\none,1\n"two,2\nthree,3\n',
        {},
        f"1 line {FIELDS}",
        ["one"],
    ),
    "quote to the end, other settings": (
        "a.csv",
        "id;text\n1;one\n2;'two\n3;three\n",
        {"sep": ";", "quote": "'", "escape": "\\"},
        SWALLOWED,
        ["one"],
    ),
    "more fields": ("a.csv", "id,text\n1,one,more\n2,two\n", {}, f"1 line {FIELDS}: '1,one,more'", ["two"]),
    "fewer fields": ("a.csv", "id,text\n1,one\n2\n", {}, f"1 line {FIELDS}: '2'", ["one"]),
    "fields, line by line": (
        "a.csv",
        "id,text\n1,one,more\n2,two\n",
        {"multiLine": "false"},
        FIELDS,
        ["two"],
    ),
}
GOOD: dict[str, tuple[str, str, Mapping[str, str], list[str]]] = {
    "array on a line": (
        "a.json",
        '[{"id": 1, "text": "one"}, {"id": 2, "text": "two"}]\n\n',
        {},
        ["one", "two"],
    ),
    "array of lines": (
        "a.json",
        '[\n{"id": 1, "text": "}{"},\n{"id": 2, "text": "two"}\n]',
        {"multiLine": "true"},
        ["}{", "two"],
    ),
    "commas behind lines": (
        "a.jsonl",
        '{"id": 1, "text": "one"},\n{"id": 2, "text": "t} {w"}\n',
        {},
        ["one", "t} {w"],
    ),
    "nested": ("a.jsonl", '{"id": 1, "text": "a", "x": [{"y": 1}, {"y": 2}]}\n', {}, ["a"]),
    "quoted line breaks": (
        "a.csv",
        'id,text\n1,"a ""b""\n\n2,""c"""\n2,"x\n"\n',
        {},
        ['a "b"\n\n2,"c"', "x\n"],
    ),
    "quotes within": ("a.csv", 'id,text\n1,5" pipe\n2,say "x"', {}, ['5" pipe', 'say "x"']),
    "quotes at both ends": ("a.csv", 'id,text\n1,"""q"""', {}, ['"q"']),
    "no line break at the end": ("a.csv", 'id,text\n1,"a"\n2,"b"', {}, ["a", "b"]),
    "empty lines": ("a.csv", "id,text\n\n1,a\n\n", {}, ["a"]),
    "byte order mark": ("a.csv", "\ufeffid,text\n1,a\n", {}, ["a"]),
}


def texts_of(
    spark: Any,
    path: Path,
    options: Mapping[str, str],
    bad_lines: BadLines = BadLines.FAIL,
    where: str | None = None,
) -> tuple[list[str], int | None, str]:
    told: list[str] = []
    text = read_source(spark, str(path), options=options).text
    assert text is not None
    rows, count = checked_rows(text, where=where, bad_lines=bad_lines, warn=told.append)
    assert not any(name.startswith("__pipemax") for name in rows.columns)
    found = [row["text"] for row in rows.collect()] if rows.columns else []
    assert count in (None, len(found)) or where is not None
    return found, count, "\n".join(told)


@pytest.mark.parametrize("case", BAD)
def test_a_line_that_is_no_row_is_shown_or_left_out_and_counted(
    spark: Any, tmp_path: Path, case: str
) -> None:
    name, text, options, said, left = BAD[case]
    (tmp_path / name).write_text(text)
    found, _, told = texts_of(spark, tmp_path / name, options, BadLines.DROP)
    assert found == left
    assert re.search(f"left out of .*{said}", told), told


@pytest.mark.parametrize("case", GOOD)
def test_what_is_well_formed_is_read_without_a_word(spark: Any, tmp_path: Path, case: str) -> None:
    name, text, options, texts = GOOD[case]
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert texts_of(spark, tmp_path / name, options)[::2] == (texts, "")


def test_what_the_user_says_of_bad_lines_is_what_becomes_of_them(spark: Any, tmp_path: Path) -> None:
    torn, fields = tmp_path / "a.jsonl", tmp_path / "a.csv"
    torn.write_text('{"id": 1, "text": "one"}\n{"id": 2, "te\n')
    fields.write_text("id,text\n1,one\n2,two,more\n")
    for path, options, texts in (
        (torn, {"mode": "PERMISSIVE"}, ["one", None]),
        (torn, {"Mode": "DROPMALFORMED"}, ["one"]),
        (fields, {"mode": "dropmalformed", "multiLine": "false"}, ["one"]),
        (fields, {"columnNameOfCorruptRecord": "oops"}, ["one", "two"]),
    ):
        found, count, _ = texts_of(spark, path, options)
        assert (found, count) == (texts, len(texts)), options
        with pytest.raises(JobError, match=r"--bad-lines drop and --input-option (mode|Mode|column)"):
            texts_of(spark, path, options, BadLines.DROP)
    for path in (torn, fields):
        with pytest.raises(JobError, match="cannot be read"):
            texts_of(spark, path, {"mode": "FAILFAST"})


def test_text_of_another_encoding_is_said(spark: Any, tmp_path: Path) -> None:
    path, header, lines = tmp_path / "a.csv", tmp_path / "header.csv", tmp_path / "a.jsonl"
    path.write_bytes("id,text\n1,Größe\n2,x\n".encode("latin-1"))
    header.write_bytes("id,text,größe\n1,x,y\n".encode("latin-1"))
    lines.write_bytes('{"text": "Größe"}\n'.encode("latin-1"))
    assert "1 row of" in texts_of(spark, path, {})[2]
    assert "header with U+FFFD" in texts_of(spark, header, {})[2]
    with pytest.raises(JobError, match="not UTF-8: give --input-option encoding="):
        texts_of(spark, lines, {})
    for each, text in ((path, "Größe"), (header, "x"), (lines, "Größe")):
        assert texts_of(spark, each, {"encoding": "ISO-8859-1"})[0][0] == text


def test_bad_lines_are_counted_whatever_the_condition_selects(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,one\n2,two\n3,three,more\n")
    for where, rows in (("id = 2", 1), ("id IN (SELECT 2)", 1)):
        with pytest.raises(JobError, match="1 line"):
            texts_of(spark, path, {}, where=where)
        _, count, told = texts_of(spark, path, {}, BadLines.DROP, where=where)
        assert count in (rows, None)
        assert "1 line" in told


def test_csv_files_of_other_columns_are_not_read_as_one(spark: Any, tmp_path: Path) -> None:
    for name, text in (("a.csv", "id,text\n1,one\n"), ("b.csv", "Text,ID\ntwo,2\n")):
        (tmp_path / name).write_text(text)
    with pytest.raises(JobError, match=r"different headers: .*a.csv has id, text, and .*b.csv has text, id"):
        texts_of(spark, tmp_path, {})
    (tmp_path / "b.csv").write_text("ID,Text\n2,two\n")
    assert sorted(texts_of(spark, tmp_path, {})[0]) == ["one", "two"]


def test_compressed_and_partitioned_files_are_looked_at_too(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(BAD["quote to the end"][1].encode()))
    with pytest.raises(JobError, match=SWALLOWED):
        texts_of(spark, tmp_path / "a.csv.gz", {})
    (tmp_path / "torn.csv.gz").write_bytes(gzip.compress(b"id,text\n" + bytes(range(40, 90)) * 90)[:-40])
    with pytest.raises(JobError, match="cannot be read"):
        texts_of(spark, tmp_path / "torn.csv.gz", {})
    for lang in ("de", "en"):
        directory = tmp_path / "parts.csv" / f"lang={lang}"
        directory.mkdir(parents=True)
        (directory / "t.csv").write_text('id,text\n1,"one\nline"\n2\n')
    found, _, told = texts_of(spark, tmp_path / "parts.csv", {}, BadLines.DROP)
    assert (found, "2 lines" in told) == (["one\nline"] * 2, True)


def test_a_job_ends_before_the_claim_or_leaves_such_lines_out(run: Jobs) -> None:
    path = run.directory / "rows.jsonl"
    path.write_text('{"id": 1, "text": "one"}\n{"id": 2, "te\n')
    given: dict[str, Any] = {
        "input": str(path),
        "id_columns": ("id",),
        "source": PromptSource(prompt_column="text"),
    }
    with pytest.raises(JobError, match=r"'\{.id.: 2"):
        run.run(**given)
    with pytest.raises(JobError, match=r"has 1 line that cannot be read as a JSON object\. Mend"):
        run.run(**given, no_sample=True)
    assert not Path(run.output).exists()
    run.run(**given, bad_lines=BadLines.DROP)
    assert "left out" in run.printed
    assert [(set(row), row["annotation"]["text"]) for row in run.rows()] == [
        ({"id", "text", "annotation"}, expected_text("one", 16))
    ]


@pytest.mark.long  # a variant of what is well formed
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "batch.jsonl"])
def test_a_file_of_0_bytes_is_an_empty_input(run: Jobs, name: str) -> None:
    path = run.directory / name
    path.write_bytes(b"")
    given: dict[str, Any] = {"input": str(path), "summary": str(run.directory / "summary.json")}
    if name == "batch.jsonl":
        given |= {"input_format": "openai-batch", "source": PromptSource(messages_column="messages")}
        given |= {"id_columns": ("custom_id",), "overrides_column": "overrides"}
    summary = run.run(**given)
    assert (summary.rows_in, Path(run.output).exists()) == (0, False)
    assert json.loads((run.directory / "summary.json").read_text())["rows_in"] == 0
    run.dry_run(**given)
    if name == "a.csv":  # the next night brings rows, and the one after it none
        path.write_text("id,text,more\n1,one,x\n")
        run.run(input=str(path))
        path.write_bytes(b"")
        summary = run.run(**given, where="more = 'x'")
        assert (summary.rows_in, len(run.rows())) == (0, 1)


NAMES = ("a [b]", "10:30", "a*b", "{x,y}", "50%20", "q?r", "h#i", "back\\s", "ü", "[z]: {1}%3A*?#")


def test_a_path_is_taken_literally_wherever_it_is_an_input(spark: Any, tmp_path: Path) -> None:
    for name in NAMES:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "t.csv").write_text("id,text\n1,one\n")
        (directory / "t.jsonl").write_text('{"id": 1, "text": "one"}\n')
        assert texts_of(spark, directory / "t.csv", {})[0] == ["one"], name
    (tmp_path / "a [b]" / "a[1].json").write_text('[{"id": 1,\n"text": "one"}]')
    assert texts_of(spark, tmp_path / "a [b]" / "a[1].json", {"multiLine": "true"})[0] == ["one"]
    everywhere = tmp_path / NAMES[-1]
    assert texts_of(spark, everywhere / "t.jsonl", {})[0] == ["one"]
    spark.range(3).write.parquet(str(everywhere / "p.parquet"))
    spark.range(4).write.format("delta").save(str(everywhere / "d"))
    assert read_source(spark, str(everywhere / "p.parquet")).rows.count() == 3
    assert read_source(spark, str(everywhere / "d")).rows.count() == 4
    for number in (1, 2):
        (tmp_path / "plain" / str(number)).mkdir(parents=True)
        (tmp_path / "plain" / str(number) / "t.csv").write_text("id,text\n1,one\n")
    assert texts_of(spark, tmp_path / "plain" / "*" / "t.csv", {})[0] == ["one", "one"], (
        "a pattern is one still"
    )


def test_a_file_whose_name_has_a_colon_is_read(spark: Any, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "10:30.csv").write_text("id,text\n1,one\n")
    (place / "a:b.jsonl").write_text('{"id": 1, "text": "one"}\n')
    (place / "c:d.json").write_text('[{"id": 1,\n"text": "one"}]')
    (place / "some").mkdir()
    for name in ("x:1.csv", "y.csv"):
        (place / "some" / name).write_text("id,text\n1,one\n")
    spark.range(3).write.parquet(str(place / "parts"))
    for part in place.glob("parts/*.parquet"):
        part.rename(part.with_name(f"p:{part.name}"))
    body = {"messages": [{"role": "user", "content": "one"}]}
    request = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (place / "r:s.jsonl").write_text(json.dumps(request) + "\n")
    for name, options, wanted in (
        ("10:30.csv", {}, ["one"]),
        ("a:b.jsonl", {}, ["one"]),
        ("c:d.json", {"multiLine": "true"}, ["one"]),
        ("some", {}, ["one", "one"]),
    ):
        assert texts_of(spark, place / name, options)[0] == wanted, name
    with pytest.raises(JobError, match="a file with a colon in its name; name the directory"):
        texts_of(spark, place / "some" / "*.csv", {})
    assert read_source(spark, str(place / "parts")).rows.count() == 3
    assert read_source(spark, str(place / "r:s.jsonl"), file_format="openai-batch").rows.count() == 1


def test_a_relative_path_with_a_colon_is_no_scheme(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [is_remote(path) for path in ("10:30/a", "a:b/c", "s3a://b/c", "hdfs:/c", "file:/c", "/a:b")] == [
        *(False, False, True, True, False, False)
    ]
    files = HadoopFiles(spark)
    for name in ("10:30/a.csv", "a:b/c.csv"):
        assert files.qualified(name).endswith(f"/{name}")


def test_a_job_runs_where_every_path_has_special_characters(run: Jobs) -> None:
    place = run.directory / NAMES[-1]
    place.mkdir()
    (place / "in.csv").write_text("id,text\n1,one\n2,two\n")
    given = {
        "input": str(place / "in.csv"),
        "output": str(place / "out"),
        "summary": str(place / "summary.json"),
    }
    summary = run.run(**given, work_dir=str(place / "work"), log_dir=place / "logs")
    assert (summary.rows_out, summary.rows_error) == (2, 0)
    assert run.spark.read.format("delta").load(str(place / "out")).count() == 2


def test_lines_of_batch_files_that_are_no_requests_are_left_out_when_asked(run: Jobs) -> None:
    path = run.directory / "requests.jsonl"
    body = {"messages": [{"role": "user", "content": "one"}]}
    line = json.dumps({"custom_id": "r1", "url": "/v1/chat/completions", "body": body})
    path.write_text(f"{line}\n{line[:-9]}\n[]\n")
    with pytest.raises(JobError, match=r"a line .*--bad-lines drop"):
        read_source(run.spark, str(path), file_format="openai-batch")
    told: list[str] = []
    source = read_source(
        run.spark, str(path), file_format="openai-batch", bad_lines=BadLines.DROP, warn=told.append
    )
    assert [row["custom_id"] for row in source.rows.collect()] == ["r1"]
    assert "2 lines that are no requests" in told[0]
    with pytest.raises(JobError, match="UTF-8"):
        read_source(run.spark, str(path), file_format="openai-batch", options={"encoding": "latin1"})
