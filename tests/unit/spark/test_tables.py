import pytest

from pipemax_spark.storage.tables import is_path


@pytest.mark.parametrize(
    "name",
    [
        "tickets",
        "sales.tickets",
        "main.sales.tickets",
        "main.sales.csv",
        "main.sales.parquet",
        "main.raw_2024.json",
        "main.sales.gz",
    ],
)
def test_a_name_of_three_identifiers_is_a_table_whatever_its_suffix(name: str) -> None:
    assert not is_path(name)


@pytest.mark.parametrize(
    "name",
    [
        "/data/main.sales.csv",
        "./main.sales.csv",
        "./a.b.csv",
        "s3://bucket/table",
        "in.parquet",
        "rows.csv",
        "rows.gz",
        "data-2024.csv",
        "rows.2024.csv",
        "my-rows.of.csv",
        "a.b.c.csv",
    ],
)
def test_a_name_that_no_table_can_have_is_a_path(name: str) -> None:
    assert is_path(name)


@pytest.mark.parametrize("name", ["in.csv.gz", "in.json.bz2", "in.jsonl.zst"])
def test_a_compressed_file_is_a_path(name: str) -> None:
    assert is_path(name)
