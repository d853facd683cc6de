"""Between pandas and Arrow, for the UDF on Spark 4.0: that release gives a UDF its columns as pandas alone.

It knows the shapes of prompts and annotations as pandas holds them, and nothing of Spark.
"""

import pandas as pd
import pyarrow as pa

from pipemax.wire import REQUEST_SCHEMA


def array_of_prompts(prompts: pd.Series) -> pa.Array:
    """Of strings, or of conversations: sequences of dicts with role and content. None stays null."""
    values = [value if value is None or isinstance(value, str) else list(value) for value in prompts]
    is_text = all(value is None or isinstance(value, str) for value in values)
    return pa.array(values, pa.string() if is_text else REQUEST_SCHEMA.field("messages").type)


def frame_of_annotations(annotations: pa.StructArray) -> pd.DataFrame:
    """A column a field, nested ones as dicts, and no number turned into a float for the nulls beside it."""
    batch = pa.RecordBatch.from_struct_array(annotations)
    return batch.to_pandas(integer_object_nulls=True, maps_as_pydicts="strict")
