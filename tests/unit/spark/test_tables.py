"""Which names are those of tables, and which are paths."""

import pytest

from pipemax_spark.storage.names import is_path

TABLES = (
    *("tickets", "sales.tickets", "main.sales.tickets", "main.sales.csv", "main.sales.parquet"),
    *("main.raw_2024.json", "main.sales.gz"),
)
"""A name of three identifiers is a table whatever its suffix."""
PATHS = (
    *("/data/main.sales.csv", "./main.sales.csv", "./a.b.csv", "s3://bucket/table", "in.parquet", "rows.csv"),
    *("rows.gz", "data-2024.csv", "rows.2024.csv", "my-rows.of.csv", "a.b.c.csv"),
    *("in.csv.gz", "in.json.bz2", "in.jsonl.zst"),
)


@pytest.mark.parametrize("name", [*TABLES, *PATHS])
def test_a_name_that_no_table_can_have_is_a_path(name: str) -> None:
    assert is_path(name) == (name in PATHS)
