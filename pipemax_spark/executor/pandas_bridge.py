"""Convert between pandas and Arrow for the UDF on Spark 4.0, which gives a UDF its columns only as pandas.

This module knows the shapes of prompts and annotations as pandas holds them, and nothing of Spark.
"""

import pandas as pd
import pyarrow as pa

from pipemax.wire import REQUEST_SCHEMA


def array_of_prompts(prompts: pd.Series) -> pa.Array:
    """Return prompts as an Arrow array of strings or of conversations; None stays null.

    A conversation is a sequence of dicts with role and content.
    """
    values = [value if value is None or isinstance(value, str) else list(value) for value in prompts]
    is_text = all(value is None or isinstance(value, str) for value in values)
    return pa.array(values, pa.string() if is_text else REQUEST_SCHEMA.field("messages").type)


def frame_of_annotations(annotations: pa.StructArray) -> pd.DataFrame:
    """Return a frame with a column per field.

    Nested fields are dicts, and integers next to nulls are not turned into floats.
    """
    batch = pa.RecordBatch.from_struct_array(annotations)
    return batch.to_pandas(integer_object_nulls=True, maps_as_pydicts="strict")
