"""Prompts and annotations as pandas holds them, for the UDF on Spark 4.0."""

import numpy as np
import pandas as pd
import pyarrow as pa

from pipemax_spark.executor.overrides import overrides_of
from pipemax_spark.executor.pandas_bridge import array_of_options, array_of_prompts, frame_of_annotations


def test_strings_and_nulls_become_arrow_strings_and_nulls() -> None:
    assert array_of_prompts(pd.Series(["a", None])).equals(pa.array(["a", None], pa.string()))


def test_conversations_come_as_arrays_of_dicts() -> None:
    message = {"role": "user", "content": "hello"}
    array = array_of_prompts(pd.Series([np.array([message], dtype=object), None]))
    assert array.to_pylist() == [[message], None]


def test_the_parts_of_conversations_are_kept() -> None:
    message = {"role": "user", "content": np.array([{"text": "what?", "image_url": None}], dtype=object)}
    array = array_of_prompts(pd.Series([np.array([message], dtype=object), None]))
    assert array.to_pylist() == [[message | {"content": [{"text": "what?", "image_url": None}]}], None]


def test_the_tool_calls_of_conversations_are_kept() -> None:
    calls = [{"function": {"name": "f", "tags": np.array(["a"], dtype=object)}}]
    message = {"role": "assistant", "content": None, "tool_calls": np.array(calls, dtype=object)}
    array = array_of_prompts(pd.Series([np.array([message], dtype=object)]))
    assert array.to_pylist() == [[message | {"tool_calls": [{"function": {"name": "f", "tags": ["a"]}}]}]]


def test_nested_fields_are_dicts_and_whole_numbers_stay_whole() -> None:
    rows = [
        {"parsed": {"label": "a", "counts": [("x", 1)]}, "prompt_tokens": 2**53 + 1},
        {"parsed": None, "prompt_tokens": None},
    ]
    counts = pa.map_(pa.string(), pa.int64())
    parsed = pa.struct([("label", pa.string()), ("counts", counts)])
    frame = frame_of_annotations(
        pa.array(rows, pa.struct([("parsed", parsed), ("prompt_tokens", pa.int64())]))
    )
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
