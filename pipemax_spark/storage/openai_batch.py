"""OpenAI's batch files as a job's input, and its output files, in the format of the Batch API, for a finished table."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError
from pipemax_spark.executor.conversations import FIELDS
from pipemax_spark.executor.openai_batch import (
    CHAT,
    LINE_COLUMN,
    PARSED_SCHEMA,
    TEXT,
    TEXT_FIELD,
    parsed_lines,
)
from pipemax_spark.storage.hadoop import HadoopFiles, is_remote, plain_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = "openai-batch"
ID_COLUMN = "custom_id"
ROW_FAULT = "row_fault"
"""Column of the errors of requests that cannot be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of batch files."""

    rows: "DataFrame"
    """custom_id, url, overrides, and messages or, for completions, prompt."""
    is_empty: bool
    dropped: str | None
    """How many lines are no requests, and the first of them, if such lines are left out."""


def read_requests(
    spark: "SparkSession",
    path: str,
    *,
    options: Mapping[str, str] | None = None,
    drops_bad_lines: bool = False,
) -> Requests:
    """Return the requests of batch files.

    The content of messages is text, or an array of parts if a message has an image; they have a field of further fields
    if one has any, and rows have a column ``row_fault`` if one cannot be asked. Raise ``JobError`` that names a request
    with which no job can begin, or a line which is no request and is not to be dropped.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.pandas.types import from_arrow_schema

    lines = spark.read.format("text").options(**(options or {})).load(path)
    assert lines.columns[0] == LINE_COLUMN, lines.columns
    parsed = lines.select(LINE_COLUMN).mapInArrow(parsed_lines, from_arrow_schema(PARSED_SCHEMA))
    is_bad = F.col(ID_COLUMN).isNull()
    fault = F.when(~is_bad, F.col("fault")) if drops_bad_lines else F.col("fault")
    (counts,) = parsed.agg(
        F.count(fault).alias("faults"),
        F.min(fault).alias("fault"),
        F.count_if(~is_bad).alias("rows"),
        F.count_if(is_bad).alias("bad"),
        F.min(F.when(is_bad, F.col("fault"))).alias("first_bad"),
        F.coalesce(F.max("has_image"), F.lit(False)).alias("has_image"),
        F.coalesce(F.max("has_fields"), F.lit(False)).alias("has_fields"),
        F.count("row_fault").alias("row_faults"),
        F.count_if(F.col("url") == CHAT).alias("chats"),
        F.count_if(F.col("url") == TEXT).alias("prompts"),
    ).collect()
    if counts["faults"]:
        more = f" ({counts['faults']:,} such requests)" if counts["faults"] > 1 else ""
        way_out = (
            ". Mend the files, or give --bad-lines drop to leave such lines out" if counts["bad"] else ""
        )
        raise JobError(f"input {path!r}: {counts['fault']}{more}{way_out}")
    if counts["chats"] and counts["prompts"]:
        raise JobError(
            f"input {path!r} has {counts['chats']:,} requests for chats and {counts['prompts']:,} for completions; put "
            "them into two files"
        )
    if counts["bad"]:
        parsed = parsed.where(~is_bad)
    if not counts["prompts"]:
        messages = F.transform(
            "messages",
            lambda message: F.struct(
                message["role"].alias("role"),
                message["content" if counts["has_image"] else TEXT_FIELD].alias("content"),
                *([message[FIELDS].alias(FIELDS)] if counts["has_fields"] else []),
            ),
        )
        parsed = parsed.withColumn("messages", messages)
    columns = [ID_COLUMN, "url", "prompt" if counts["prompts"] else "messages", "overrides"]
    return Requests(
        rows=parsed.select(*columns, *([ROW_FAULT] if counts["row_faults"] else [])),
        is_empty=not counts["rows"],
        dropped=f"{counts['bad']:,} lines that are no requests: {counts['first_bad']}"
        if counts["bad"]
        else None,
    )


def errors_path(path: str) -> str:
    """Return the file of requests without an answer, next to the file of answers."""
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}.errors.{suffix}" if dot and "/" not in suffix else f"{path}.errors"


def write_answers(rows: "DataFrame", path: str, *, model: str) -> tuple[int, int]:
    """Write annotated rows as OpenAI's output file and error file; return how many lines each has.

    Each file appears whole, in the place of an older one. There is a file of errors if it has lines, or had some.
    """
    spark = rows.sparkSession
    counts = [0, 0]
    with tempfile.TemporaryDirectory(dir=_near(path)) as directory:
        drafts = [Path(directory) / name for name in ("answers", "errors")]
        with drafts[0].open("w", encoding="utf-8") as good, drafts[1].open("w", encoding="utf-8") as bad:
            for row in rows.select(ID_COLUMN, "url", "annotation").toLocalIterator():
                values = row.asDict(recursive=True)
                is_bad = values["annotation"]["error"] is not None
                (bad if is_bad else good).write(output_line(values, model=model) + "\n")
                counts[is_bad] += 1
        # The answers come last: once they are there, all is.
        if counts[1] or _exists(spark, errors_path(path)):
            _put(spark, drafts[1], errors_path(path))
        _put(spark, drafts[0], path)
    return counts[0], counts[1]


def output_line(row: Mapping[str, Any], *, model: str) -> str:
    """Return the line of an annotated row, which has custom_id, url and annotation.

    The status of an error is 500 if the engine is the cause, else 400.
    """
    custom_id, error = row["custom_id"], row["annotation"]["error"]
    if error is None:
        status, body = 200, _answer(row, model)
    else:
        is_engine = error["code"].startswith("engine")
        kind = "server_error" if is_engine else "invalid_request_error"
        status = 500 if is_engine else 400
        body = {"error": {"message": error["message"], "type": kind, "code": error["code"]}}
    response = {"status_code": status, "request_id": f"req-{custom_id}", "body": body}
    line = {"id": f"batch_req_{custom_id}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, ensure_ascii=False)


def _answer(row: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the body of an answer; a sample that failed is left out."""
    annotation, is_chat = row["annotation"], row["url"] != TEXT
    samples = annotation.get("samples") or [annotation["text"]]
    choices: list[dict[str, Any]] = []
    for index, text in enumerate(text for text in samples if text is not None):
        message = {"role": "assistant", "content": text}
        if index == 0 and annotation.get("reasoning") is not None:
            message["reasoning_content"] = annotation["reasoning"]
        answer = {"message": message} if is_chat else {"text": text}
        finish = annotation["finish_reason"] or "stop"
        choices.append({"index": index, **answer, "finish_reason": finish, "logprobs": None})
    prompt_tokens = annotation["prompt_tokens"] or 0
    completion_tokens = annotation["completion_tokens"] or 0
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row['custom_id']}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(annotation["completed_at"].timestamp()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _near(path: str) -> str | None:
    """Return the directory of a local file, made if need be, so that a draft in it can be renamed."""
    if is_remote(path):
        return None
    directory = Path(plain_path(path)).absolute().parent
    directory.mkdir(parents=True, exist_ok=True)
    return str(directory)


def _exists(spark: "SparkSession", path: str) -> bool:
    return HadoopFiles(spark).exists(path) if is_remote(path) else Path(plain_path(path)).exists()


def _put(spark: "SparkSession", draft: Path, path: str) -> None:
    if is_remote(path):
        HadoopFiles(spark).put(draft, path)
    else:
        draft.replace(plain_path(path))
