"""Count what a job reads and shuffles before its first row reaches an engine, on a made-up table of a billion rows.

    python lab/bench/scale_preparing.py samples [--files 16000] [--way now|before]
    python lab/bench/scale_preparing.py rerun [--files 20] [--files-left 1] [--way now|before]
    python lab/bench/scale_preparing.py night [--files 160] [--files-left 1] [--way now|before]

The table has ``--files`` files of 62,500 rows, and each is a hard link to the same file; what tells their rows apart is
a partition column, which is in Delta's log only. So 16,000 files are a billion rows for Delta and for Spark, on 10 MB
of disk. Each file is a split of its own, as large files are.

``samples`` draws the sample for ``policy: auto`` and that for the advice on prefixes; all prompts begin in one of ten
ways. ``rerun`` and ``night`` look for the rows of ``--files-left`` files that an output lacks, which is made up in the
same way: among all rows, and among a night's rows only. ``--way before`` does what the job did until 2026-11-23. Rows
and bytes are those that Spark counts, so they do not depend on the machine; seconds do. Spark broadcasts nothing by its
own choice, as in a large table.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F  # noqa: N812

from pipemax_spark.job.outcomes import written
from pipemax_spark.request.columns import RequestColumns, prompt_text
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.left import number_of_rows, rows_left, rows_of_keys
from pipemax_spark.rows.prefix import sample_by_beginning
from pipemax_spark.rows.sample import sample_requests
from pipemax_spark.spark.session import get_session
from tests.spark.spark_work import counted

ROWS_PER_FILE = 62_500
IDS = ("id",)
SETTINGS = {
    "spark.sql.files.openCostInBytes": "128m",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.adaptive.autoBroadcastJoinThreshold": "-1",
    "spark.sql.shuffle.partitions": "8",
    "spark.databricks.delta.snapshotPartitions": "4",
    "spark.driver.memory": "2g",
    "spark.ui.enabled": "false",
}
TEXT = "concat(rpad(concat('document ', i % 10), 90, '.'), sha2(cast(i AS string), 512)) AS text"
ANNOTATION = (
    "named_struct('text', 'an answer', 'spec_hash', 'spec', 'error', cast(NULL AS struct<code: string>))"
)


def make_table(spark: Any, path: Path, *, files: int, annotation: str | None = None) -> Any:
    """Make a Delta table whose files are one file, and return it."""
    rows = spark.range(ROWS_PER_FILE, numPartitions=1).selectExpr("id AS i").selectExpr("i", TEXT)
    if annotation is not None:
        rows = rows.selectExpr("*", f"{annotation} AS annotation")
    rows.coalesce(1).write.parquet(str(path / "_one"))
    one = next((path / "_one").glob("*.parquet"))
    fields = [*rows.schema.jsonValue()["fields"]]
    fields.append({"name": "part", "type": "integer", "nullable": True, "metadata": {}})
    metadata = {
        "id": path.name,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": fields}),
        "partitionColumns": ["part"],
        "configuration": {},
        "createdTime": 0,
    }
    actions: list[dict[str, Any]] = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": metadata},
    ]
    for part in range(files):
        name = f"part={part}/rows.parquet"
        (path / name).parent.mkdir()
        os.link(one, path / name)
        stats = json.dumps({"numRecords": ROWS_PER_FILE})
        add = {"path": name, "partitionValues": {"part": str(part)}, "size": one.stat().st_size}
        actions.append({"add": add | {"modificationTime": 0, "dataChange": True, "stats": stats}})
    (path / "_delta_log").mkdir()
    (path / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))
    table = spark.read.format("delta").load(str(path))
    table.count()  # so that the table's log has been read
    # Not the partition column as an id: Spark would read only the files of the ids that it looks for.
    return table.withColumn("id", F.expr(f"part * {ROWS_PER_FILE}L + i"))


def measured(spark: Any, act: Callable[[], Any]) -> dict[str, float]:
    began_s = time.monotonic()
    with counted(spark) as work:
        found = act()
    figures = {
        "found": len(found) if isinstance(found, list) else found,
        "tasks": work.tasks,
        "rows_read": work.rows_read,
        "rows_shuffled": work.rows_shuffled,
        "mb_shuffled": round(work.bytes_shuffled / 1e6, 1),
        "seconds": round(time.monotonic() - began_s, 1),
    }
    print(figures, file=sys.stderr, flush=True)
    return figures


def samples(spark: Any, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    table = make_table(spark, directory / "in", files=args.files)
    rows_in, columns = table.count(), RequestColumns(PromptSource(prompt_column="text"))
    requests = columns.add(table)
    text = prompt_text(requests)
    if args.way == "before":
        drawn = columns.add(table.sample(fraction=min(1.0, 1_500 / rows_in), seed=0))
        # No beginning of ten is drawn, as a rule, so all rows are looked at.
        alike = table.where("pmod(xxhash64(substring(text, 10, 64)), 1000) = 0")
        return {
            "auto": measured(spark, lambda: drawn.select(prompt_text(drawn)).limit(1_000).collect()),
            "prefixes": measured(spark, lambda: alike.limit(2_000).collect()),
        }
    return {
        "auto": measured(spark, lambda: sample_requests(table, columns, rows_in)),
        "prefixes": measured(spark, lambda: sample_by_beginning(requests, text, rows_in=rows_in).texts),
    }


def search(spark: Any, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Find and write down what is left, of the whole table or of its last files, as ``Preparing`` does."""
    table = make_table(spark, directory / "in", files=args.files)
    done = make_table(spark, directory / "out", files=args.files - args.files_left, annotation=ANNOTATION)
    done = done.where("annotation.spec_hash = 'spec'")
    is_night = args.part == "night"
    rows = table.where(f"part >= {args.files - args.files_left}") if is_night else table

    def now() -> int:
        keys = rows_left(rows, done, IDS, are_few=is_night).select(*IDS)
        keys = written(spark, keys, str(directory / "keys"))
        left = rows_of_keys(rows, keys, IDS, are_few=True)
        number = number_of_rows(keys, IDS)
        left.write.format("noop").mode("overwrite").save()
        return number

    def before() -> int:
        left = rows_left(rows, done, IDS)
        number = int(left.count())
        left.write.format("noop").mode("overwrite").save()
        return number

    return {args.part: measured(spark, now if args.way == "now" else before)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("samples", "rerun", "night"))
    parser.add_argument("--files", type=int, default=None)
    parser.add_argument("--files-left", type=int, default=1)
    parser.add_argument("--way", choices=("now", "before"), default="now")
    args = parser.parse_args()
    args.files = args.files or {"samples": 16_000, "rerun": 20, "night": 160}[args.part]
    submit = " ".join(f"--conf {name}={value}" for name, value in SETTINGS.items())
    os.environ |= {"PYSPARK_SUBMIT_ARGS": f"{submit} pyspark-shell", "PYSPARK_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for name in ("in", "out"):
            (directory / name).mkdir()
        spark = get_session("preparing", log_dir=directory / "logs")
        found = (samples if args.part == "samples" else search)(spark, args, directory)
        rows = args.files * ROWS_PER_FILE
        print(json.dumps({"way": args.way, "files": args.files, "rows": rows, **found}, indent=1))
        spark.stop()
    print("load average", *map(str, os.getloadavg()))


if __name__ == "__main__":
    main()
