"""Convert between pandas and Arrow for the UDF on Spark 4.0, which gives a UDF its columns only as pandas.

This module knows the shapes of prompts and annotations as pandas holds them, and nothing of Spark.
"""

from typing import Any

import pandas as pd
import pyarrow as pa


def array_of_prompts(prompts: pd.Series) -> pa.Array:
    """Return prompts as an Arrow array of strings or of conversations; None stays null.

    A conversation is a sequence of dicts with role and content.
    """
    values: list[Any] = [
        list(value) if hasattr(value, "__iter__") and not isinstance(value, str) else value
        for value in prompts
    ]
    if all(value is None or isinstance(value, str) for value in values):
        return pa.array(values, pa.string())
    return pa.array([value and _listed(value) for value in values])


def _listed(value: Any) -> Any:
    """Return a value with lists in place of pandas' arrays, at any depth, such as those of parts and tool calls."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    match value:
        case list():
            return [_listed(part) for part in value]
        case dict():
            return {name: _listed(part) for name, part in value.items()}
    return value


def array_of_options(options: pd.DataFrame | pd.Series) -> pa.Array:
    """Return the options of rows as an Arrow array. Structs come as a frame with a column per field.

    A null struct is one of nulls. Whole numbers next to nulls come as floats, which ``executor.overrides`` takes where
    they are whole.
    """
    if isinstance(options, pd.Series):
        return pa.array(options, from_pandas=True)
    columns = {str(name): pa.array(options[name], from_pandas=True) for name in options}
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def pandas_of(values: pa.Array) -> pd.DataFrame | pd.Series:
    """Return structs as a frame with a column per field, and other values as a series.

    Nested fields are dicts, and integers next to nulls are not turned into floats.
    """
    if not pa.types.is_struct(values.type):
        return values.to_pandas()
    batch = pa.RecordBatch.from_struct_array(values)
    return batch.to_pandas(integer_object_nulls=True, maps_as_pydicts="strict")
