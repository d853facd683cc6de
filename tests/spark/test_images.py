"""Images through Spark: bytes, paths and parts of messages reach the engine, and a bad one is its row's error."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark import annotate
from pipemax_spark.functions.udf import register
from pipemax_spark.request.prompts import PromptSource
from tests.fakes.engine import image_text
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs

CAT, DOG, OWL = b"\x89cat\xff", b"\x89dog\xff", b"\x89owl\xff"


def answer(prompt: str, *images: bytes) -> str:
    return expected_text("\n".join([*map(image_text, images), prompt]), 16)


@pytest.mark.long  # tests/unit/checkpoint and tests/engine have images
def test_a_job_answers_rows_with_images_and_keeps_a_bad_one_as_an_error(run: Jobs) -> None:
    run.defaults = replace(
        run.defaults,
        source=PromptSource(template="What is {text}?", image_column="photo"),
        id_columns=("id",),
        select=("id",),
    )
    rows = [(1, "it", CAT), (2, "it", DOG), (3, "it", CAT), (4, "it", None), (5, None, CAT)]
    run.write_input(rows, "id long, text string, photo binary")
    run.run()
    kept = {row["id"]: row["annotation"] for row in run.rows()}
    assert [kept[number]["text"] for number in (1, 2, 3)] == [
        answer("What is it?", image) for image in (CAT, DOG, CAT)
    ]
    assert [kept[number]["error"]["code"] for number in (4, 5)] == ["invalid_image", "empty_prompt"]


@pytest.mark.long  # the first test has images, tests/unit/checkpoint their forms
def test_paths_and_parts_of_messages_and_sql_take_images_too(
    spark: Any, fake: dict[str, Any], tmp_path: Path
) -> None:
    photo = tmp_path / "cat.png"
    photo.write_bytes(CAT)
    options = fake | {"max_tokens": 16}
    frame = spark.createDataFrame(
        [("a", str(photo)), ("b", str(tmp_path / "none.png"))], "text string, path string"
    )
    asked = annotate(
        frame,
        prompt_column="text",
        image_column="path",
        ask={"what": "What?", "where": "Where?"},
        **options,
    )
    seen = {row["text"]: row for row in asked.collect()}
    assert seen["a"]["what"]["text"] == answer("a\n\nWhat?", CAT)
    assert seen["a"]["where"]["text"] == answer("a\n\nWhere?", CAT)
    assert "does not exist" in seen["b"]["annotation"]["error"]["message"]

    chats = spark.sql(
        "SELECT array(named_struct('role', 'user', 'content', array("
        f"named_struct('type', 'image_url', 'text', NULL, 'image_url', named_struct('url', '{photo.as_uri()}')),"
        "named_struct('type', 'text', 'text', 'Which?', 'image_url', NULL)))) AS chat"
    )
    (row,) = annotate(chats, messages_column="chat", **options).collect()
    assert row["annotation"]["text"] == answer("Which?", CAT)

    register(spark, "look", images=True, **options)
    frame.createOrReplaceTempView("photos")
    told = spark.sql(
        "SELECT text, look(text, path) AS by_path,"
        " look(text, X'0102', named_struct('max_tokens', 1)) AS by_bytes FROM photos"
    ).collect()
    by_text = {row["text"]: row for row in told}
    assert by_text["a"]["by_path"]["text"] == answer("a", CAT)
    assert by_text["b"]["by_path"]["error"]["code"] == "invalid_image"
    assert by_text["b"]["by_bytes"]["text"] == "reply"
