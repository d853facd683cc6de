"""Convert between pandas and Arrow for the UDF on Spark 4.0, which gives a UDF its columns only as pandas.

This module knows the shapes of prompts and annotations as pandas holds them, and nothing of Spark.
"""

from typing import Any

import pandas as pd
import pyarrow as pa

from pipemax_spark.executor.overrides import OVERRIDE_FIELDS


def array_of_prompts(prompts: pd.Series) -> pa.Array:
    """Return prompts as an Arrow array of strings or of conversations; None stays null.

    A conversation is a sequence of dicts with role and content.
    """
    values: list[Any] = [
        value if value is None or isinstance(value, str) else list(value) for value in prompts
    ]
    if all(value is None or isinstance(value, str) for value in values):
        return pa.array(values, pa.string())
    return pa.array([value and [_turn(turn) for turn in value] for value in values])


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose parts, if it has any, are a list."""
    content = turn["content"]
    return turn if content is None or isinstance(content, str) else {**turn, "content": list(content)}


def array_of_options(options: pd.DataFrame | pd.Series) -> pa.Array:
    """Return the options of rows as an Arrow array. Structs come as a frame with a column per field.

    A null struct is one of nulls. Whole numbers next to nulls come as floats, and become whole again.
    """
    if isinstance(options, pd.Series):
        return pa.array(options, from_pandas=True)
    columns = {str(name): _array_of_option(str(name), options[name]) for name in options}
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def _array_of_option(name: str, values: pd.Series) -> pa.Array:
    array = pa.array(values, from_pandas=True)
    wanted = OVERRIDE_FIELDS.get(name)
    if wanted is None or not pa.types.is_integer(wanted) or not pa.types.is_floating(array.type):
        return array
    # Beyond 2**53 a float may be another number than the one that was written.
    is_whole = all(
        value is None or (value.is_integer() and abs(value) <= 2**53) for value in array.to_pylist()
    )
    return array.cast(pa.int64()) if is_whole else array


def frame_of_annotations(annotations: pa.StructArray) -> pd.DataFrame:
    """Return a frame with a column per field.

    Nested fields are dicts, and integers next to nulls are not turned into floats.
    """
    batch = pa.RecordBatch.from_struct_array(annotations)
    return batch.to_pandas(integer_object_nulls=True, maps_as_pydicts="strict")
