"""Users' columns of images and conversations become those of a request."""

from typing import Any

import pyarrow as pa
import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.executor.conversations import messages_of
from pipemax_spark.executor.images import images_of
from pipemax_spark.executor.requests import request_batch
from pipemax_spark.functions.udf import _request_columns
from pipemax_spark.request.generation import with_image_settings


def content(data: bytes) -> dict[str, Any]:
    return {"content": data, "source": None}


def source(text: str) -> dict[str, Any]:
    return {"content": None, "source": text}


MISSING = {"content": None, "source": None}


@pytest.mark.parametrize(
    ("column", "images"),
    [
        (pa.array([b"a", None], pa.binary()), [[content(b"a")], [MISSING]]),
        (pa.array(["/a", "b"]), [[source("/a")], [source("b")]]),
        (
            pa.array([[b"a", b"b"], [], None, [None]], pa.list_(pa.binary())),
            [[content(b"a"), content(b"b")], [], [MISSING], [MISSING]],
        ),
        (pa.array([["/a"], ["b", "c"]]).slice(1), [[source("b"), source("c")]]),
    ],
)
def test_images_are_bytes_or_sources_and_a_null_is_a_missing_image(
    column: pa.Array, images: list[Any]
) -> None:
    assert request_batch(0, len(column), images=column)["images"].to_pylist() == images


def test_images_of_another_type_are_refused() -> None:
    with pytest.raises(JobError, match="images are of the type int64"):
        images_of(pa.array([1]))


def test_parts_of_messages_are_those_of_openai() -> None:
    turns = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "text": None, "image_url": {"url": "data:,x", "detail": "low"}},
                {"type": "text", "text": "what?", "image_url": None},
                {"type": "input_audio", "text": "no", "image_url": None},
            ],
        }
    ]
    (row,) = messages_of(pa.array([turns]))[0].to_pylist()
    assert row == [
        {
            "role": "user",
            "content": None,
            "parts": [
                {"text": None, "image": source("data:,x")},
                {"text": "what?", "image": None},
                None,
            ],
            "fields": None,
        }
    ]
    plain = pa.array([[{"role": "user", "content": "hi"}], None])
    assert messages_of(plain)[0].to_pylist() == [
        [{"role": "user", "content": "hi", "parts": None, "fields": None}],
        None,
    ]


def test_a_function_takes_images_and_options_in_any_order() -> None:
    prompts, photo = pa.array(["a"]), pa.array([b"x"])
    options = pa.array([{"max_tokens": 3}])
    for given in ((prompts, photo, options), (prompts, options, photo)):
        assert set(_request_columns(given, takes_images=True)) == {"prompt", "images", "overrides"}
    with pytest.raises(JobError, match="it was given 3 columns"):
        _request_columns((prompts, photo, photo), takes_images=True)
    with pytest.raises(JobError, match="the options of a row are of the type binary"):
        _request_columns((prompts, photo))


def test_a_job_with_images_takes_stock_vllm_and_refuses_pipemax() -> None:
    engine = {"model": "m", "images": {"max_bytes": 5, "allow_urls": ["a"]}}
    assert with_image_settings(engine, has_images=True, allow_urls=("b",)) == {
        "model": "m",
        "policy": "vllm",
        "images": {"max_bytes": 5, "allow_urls": ["a", "b"]},
    }
    assert with_image_settings({}, has_images=True, allow_urls="a, b")["images"] == {"allow_urls": ["a", "b"]}
    assert with_image_settings(engine, has_images=False) == engine
    with pytest.raises(JobError, match="policy pipemax serves text only"):
        with_image_settings({"policy": "pipemax"}, has_images=True)
    with pytest.raises(JobError, match="no column has images"):
        with_image_settings(engine, has_images=False, allow_urls=("b",))
