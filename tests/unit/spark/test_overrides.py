"""A struct column of options becomes the overrides of requests."""

import pyarrow as pa
import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.executor.overrides import overrides_of


def test_a_row_names_an_adapter_in_text() -> None:
    options = pa.array([{"lora": "red"}, {"lora": None}, None])
    assert [row and row["lora"] for row in overrides_of(options).to_pylist()] == ["red", None, None]


def test_an_adapter_s_name_of_another_type_is_refused() -> None:
    with pytest.raises(JobError, match="the option lora of a row is of the type int64; it must be string"):
        overrides_of(pa.array([{"lora": 1}]))
