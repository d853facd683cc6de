"""Runs jobs and functions on strange inputs, and says in a few words what came out."""

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from pipemax_spark import annotate, annotate_table, pipemax_udf
from pipemax_spark.errors import JobError, JobFailedError
from tests.fakes.settings import fake_config
from tests.spark.spark_work import set_to


class Bench:
    """Runs jobs and functions on a case's input, and says in a few words what came out."""

    def __init__(self, spark: Any, directory: Path, engine_python: str) -> None:
        self.spark, self.directory = spark, directory
        self._engine = {"engine": fake_config(), "engine_python": engine_python, "max_tokens": 8}

    def file(self, name: str, content: str | bytes) -> str:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    def view(self, sql: str) -> str:
        self.spark.sql(sql).createOrReplaceTempView("strange")
        return "strange"

    def table(self, sql: str, name: str = "in") -> str:
        path = str(self.directory / name)
        self.spark.sql(sql).write.format("delta").save(path)
        return path

    def partitioned(self, columns: str, by: str) -> None:
        """Make the output a table partitioned by a column."""
        self.spark.sql(
            f"CREATE TABLE delta.`{self.directory}/out` ({columns}) USING delta PARTITIONED BY ({by})"
        )

    def job(self, source: str, *, runs: int = 2, **options: Any) -> str:
        """Run the same job several times; return the outcome of the last run and the output's rows."""
        output = options.pop("output", str(self.directory / "out"))
        prompt = (
            {}
            if {"prompt_column", "messages_column", "template", "input_format"} & options.keys()
            else {"prompt_column": "text"}
        )
        try:
            for _ in range(runs):
                annotate_table(
                    self.spark,
                    input=source,
                    output=output,
                    mlflow_experiment="",
                    log_dir=self.directory / "logs",
                    **{**self._engine, **prompt, **options},
                )
        except (JobError, JobFailedError, TypeError) as error:
            how = "failed" if isinstance(error, JobFailedError) else "refused"
            return f"{how}: {self._sentence(error)}"
        if not Path(output).exists():
            return "nothing to annotate, and no output is made"
        return self._count(self.spark.read.format("delta").load(output).collect())

    def udf(self, sql: str, **options: Any) -> str:
        """Return what the function makes of the rows of a query with a column ``text``, and with ``options`` if any."""
        function = pipemax_udf(**{**self._engine, **options})
        rows = self.spark.sql(sql)
        columns = [name for name in ("text", "options") if name in rows.columns]
        return self._count(rows.select(function(*columns).alias("annotation")).collect())

    def texts(self, sql: str, **options: Any) -> list[str]:
        """Return the answers of ``annotate()``, which repeat the prompts, in the order of the query."""
        rows = annotate(self.spark.sql(sql), **{**self._engine, **options}).collect()
        return [row["annotation"]["text"] for row in rows]

    def under(self, settings: Mapping[str, str], sql: str, **options: Any) -> list[str]:
        """Do the same under these settings of the session."""
        with set_to(self.spark, settings):
            return self.texts(sql, **options)

    def answers(self) -> list[str]:
        """Return the answers in the job's output."""
        rows = (
            self.spark.read.format("delta").load(str(self.directory / "out")).orderBy("custom_id").collect()
        )
        return [row["annotation"]["text"] for row in rows]

    def annotated(self, sql: str) -> str:
        """Return what ``annotate()`` makes of the rows of a query with a column ``text``."""
        rows = self.spark.sql(sql)
        annotated = annotate(rows, prompt_column="text", **self._engine)
        assert annotated.columns == [*rows.columns, "annotation"]
        return self._count(annotated.collect())

    def _sentence(self, error: Exception) -> str:
        return shorten(str(error).replace(str(self.directory), "…"), 140, placeholder=" …")

    @staticmethod
    def _count(rows: list[Any]) -> str:
        errors = sorted(row["annotation"]["error"]["code"] for row in rows if row["annotation"]["error"])
        answers = len(rows) - len(errors)
        return f"{answers} answer{'s' * (answers != 1)}" + (f", {', '.join(errors)}" if errors else "")


_TEXT = "concat('p ', id) AS text"


def four(*columns: str) -> str:
    """Return a query of four rows with an id, a text and these columns."""
    return f"SELECT {', '.join(('id', _TEXT, *columns))} FROM range(4)"


def request(number: int, content: Any, **body: Any) -> str:
    asked = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **body}
    line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    return json.dumps(line) + "\n"
