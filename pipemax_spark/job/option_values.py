"""Read what users give for a job's options: texts, files and Python values. ``JobError`` says what is wrong."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError, NewSpec
from pipemax_spark.request.formats import is_inline, response_schema
from pipemax_spark.request.questions import asked_of_text
from pipemax_spark.spark.sql import split_names
from pipemax_spark.storage.hadoop import read_file
from pipemax_spark.storage.openai_batch import FORMAT as BATCH_FORMAT
from pipemax_spark.storage.openai_batch import ID_COLUMN as BATCH_ID

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    Session = Callable[[], SparkSession]


def read_engine(file: str, session: "Session") -> dict[str, Any]:
    """Return the engine config in this file. Raise ``JobError`` if the file cannot be read or holds something else."""
    import yaml

    text = read_file(file, session, option="engine")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobError(f"engine config {file!r} cannot be read: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise JobError(f"engine config {file!r} holds a {type(values).__name__}; write 'name: value' lines")
    return values


def read_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns, which are comma-separated if they come as one string.

    There, a name with a comma, or with blanks around it, is put in backticks. A list has the names as they are.
    """
    names = split_names(value, ",") if isinstance(value, str) else value
    return tuple(name for name in names if name)


def read_duration(value: str | timedelta) -> timedelta:
    """Return the duration for ``commit_every``. Raise ``JobError`` if the text is not a duration."""
    if isinstance(value, timedelta):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", value.strip())
    if match is None or float(match[1]) == 0:
        raise JobError(f"commit-every is {value!r}; write it as 15m, 900s or 1h")
    return timedelta(seconds=float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]])


def read_response_format(value: str, session: "Session") -> str | None:
    """Return the schema that the text is, or that is in the file of this name; None for free text."""
    text = value if is_inline(value) else read_file(value, session, option="response_format")
    return response_schema(text, session)


def read_grammar(value: str, session: "Session") -> str:
    """Return the grammar that the text is, or that is in the file of this name."""
    is_inline = "::=" in value or "\n" in value or re.match(r"\s*start\s*:", value)
    return value if is_inline else read_file(value, session, option="grammar")


def read_ask(value: Sequence[str], session: "Session") -> dict[str, Any]:
    """Return the questions by name, with the schemas of those that name files."""
    asked = asked_of_text(value, lambda file: read_file(file, session, option="ask"))
    for name, value in asked.items():
        if isinstance(value, dict) and isinstance(text := value.get("response_format"), str):
            asked[name] = value | {"response_format": read_response_format(text, session)}
    return asked


def read_key_value(option: str) -> tuple[str, str]:
    """Return name and value of ``KEY=VALUE``. Raise ``JobError`` for another text."""
    key, separator, value = option.partition("=")
    if not separator:
        raise JobError(f"input-option {option!r} is not of the form KEY=VALUE")
    return key, value


def with_new_spec(args: Sequence[str]) -> list[str]:
    """Return a command's arguments, with the value of a ``--new-spec`` that has none."""
    ends = [*args[1:], "--"]
    return [
        f"{one}={NewSpec.STACK}" if one == "--new-spec" and end.startswith("-") else one
        for one, end in zip(args, ends, strict=False)
    ]


def with_batch_columns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, with the columns that OpenAI's batch files have where no others are named."""
    if values.get("input_format") != BATCH_FORMAT:
        return dict(values)
    columns: dict[str, Any] = {"id_columns": (BATCH_ID,), "overrides_column": "overrides"}
    if not {"prompt_column", "messages_column", "template"} & values.keys():
        columns["messages_column"] = "messages"
    return {**columns, **values}
