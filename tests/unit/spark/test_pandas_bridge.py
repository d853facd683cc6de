"""Prompts and annotations as pandas holds them, for the UDF on Spark 4.0."""

import numpy as np
import pandas as pd
import pyarrow as pa

from pipemax_spark.executor.overrides import overrides_of
from pipemax_spark.executor.pandas_bridge import array_of_options, array_of_prompts, pandas_of


def test_strings_and_nulls_become_arrow_strings_and_nulls() -> None:
    assert array_of_prompts(pd.Series(["a", None])).equals(pa.array(["a", None], pa.string()))


def test_conversations_come_as_arrays_of_dicts_and_keep_their_parts_and_tool_calls() -> None:
    plain = {"role": "user", "content": "hello"}
    parts, calls = (
        [{"text": "what?", "image_url": None}],
        [{"function": {"name": "f", "tags": ["a"]}}],
    )
    for kept, made in (
        (plain, plain),
        (plain | {"content": parts}, plain | {"content": np.array(parts, dtype=object)}),
        (
            plain | {"tool_calls": calls},
            plain | {"tool_calls": np.array([{"function": {"name": "f", "tags": np.array(["a"])}}])},
        ),
    ):
        array = array_of_prompts(pd.Series([np.array([made], dtype=object), None]))
        assert array.to_pylist() == [[kept], None]


def test_nested_fields_are_dicts_and_whole_numbers_stay_whole() -> None:
    rows = [
        {"parsed": {"label": "a", "counts": [("x", 1)]}, "prompt_tokens": 2**53 + 1},
        {"parsed": None, "prompt_tokens": None},
    ]
    counts = pa.map_(pa.string(), pa.int64())
    parsed = pa.struct([("label", pa.string()), ("counts", counts)])
    frame = pandas_of(pa.array(rows, pa.struct([("parsed", parsed), ("prompt_tokens", pa.int64())])))
    assert frame["parsed"].tolist() == [{"label": "a", "counts": {"x": 1}}, None]
    assert frame["prompt_tokens"].tolist() == [2**53 + 1, None]


def test_whole_numbers_that_nulls_made_floats_become_whole_again() -> None:
    options = pd.DataFrame({"seed": [7.0, None], "stop": [np.array(["x"]), None], "temperature": [0.5, None]})
    overrides, faults = overrides_of(array_of_options(options))
    assert [{name: row[name] for name in options} for row in overrides.to_pylist()] == [
        {"seed": 7, "stop": ["x"], "temperature": 0.5},
        {"seed": None, "stop": None, "temperature": None},
    ]
    assert faults == [None, None]


def test_a_seed_that_a_float_cannot_hold_is_refused() -> None:
    _, (fault, none) = overrides_of(array_of_options(pd.DataFrame({"seed": [2.0**60, None]})))
    assert fault is not None
    assert (fault.code, none) == ("invalid_parameter", None)
