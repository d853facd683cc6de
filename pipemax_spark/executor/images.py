"""Convert users' columns of images into those of a request.

An image is its bytes (binary) or where it is (string); a row has one, or an array of them.
"""

import itertools

import pyarrow as pa
import pyarrow.compute as pc

from pipemax.wire import IMAGE_TYPE
from pipemax_spark.errors import JobError


def images_of(column: pa.Array) -> pa.ListArray:
    """Return each row's images. A null is an image that is missing; an empty array has none.

    Raise ``JobError`` for a column of another type.
    """
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        # A null array is one missing image too: a row that lost its images must not be answered without them.
        lengths = pc.fill_null(pc.list_value_length(column), 1).cast(pa.int32())
        values = column.flatten()
        if column.null_count:
            # By places, not by values: a path may be no UTF-8, which is its row's error later.
            next_place = itertools.count()
            places = [
                [None] if length is None else list(itertools.islice(next_place, length))
                for length in pc.list_value_length(column).to_pylist()
            ]
            values = values.take(pa.array(itertools.chain.from_iterable(places), pa.int64()))
        images = _images(values, kind)
    else:
        lengths = pa.repeat(pa.scalar(1, pa.int32()), len(column))
        images = _images(column, kind)
    ends = pc.cumulative_sum(lengths).cast(pa.int32())
    return pa.ListArray.from_arrays(pa.concat_arrays([pa.array([0], pa.int32()), ends]), images)


def is_image(kind: pa.DataType) -> bool:
    """Tell whether a column of this type can hold images."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    return any(check(kind) for check in checks)


def _images(values: pa.Array, kind: pa.DataType) -> pa.StructArray:
    nulls = pa.nulls(len(values), pa.binary()), pa.nulls(len(values), pa.string())
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        columns = [values.cast(pa.binary()), nulls[1]]
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        columns = [nulls[0], values.cast(pa.string())]
    elif pa.types.is_null(values.type):
        columns = [*nulls]
    else:
        raise JobError(f"images are of the type {kind}; give binary or string, or an array of them")
    return pa.StructArray.from_arrays(columns, fields=list(IMAGE_TYPE))
