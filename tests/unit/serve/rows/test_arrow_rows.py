"""Request batches become requests, completions become batches."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipemax.api import Completion, Image, Message, Sampling
from pipemax.serve.rows.arrow_rows import (
    FinishedRow,
    completion_batch,
    embedding_array,
    requests_of,
    row_seed,
)
from pipemax.wire import COMPLETION_SCHEMA, REQUEST_SCHEMA, ErrorCode
from tests.serve.support import request_batch


def test_a_request_has_the_job_s_sampling_where_the_row_says_nothing() -> None:
    job = Sampling(max_tokens=9, temperature=0.5, stop=("END",))
    batch = request_batch(["a", "b"], 7, overrides=[None, {"max_tokens": 3, "stop": ["X", None]}])
    requests, faults = requests_of(batch, job=job, system="Be brief.", id_prefix="4:")
    assert faults == []
    assert [request.request_id for request in requests] == ["4:7", "4:8"]
    assert requests[0].sampling is job
    assert requests[1].sampling == Sampling(max_tokens=3, temperature=0.5, stop=("X",))
    assert requests[0].system == "Be brief."


def test_messages_become_turns_and_an_incomplete_turn_an_error_row() -> None:
    good = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    bad = [{"role": "user", "content": None}]
    batch = request_batch([None, None], messages=[good, bad])
    requests, faults = requests_of(batch, job=Sampling(), system=None, id_prefix="")
    assert [request.messages for request in requests] == [
        (Message(role="user", content="hi"), Message(role="assistant", content=""))
    ]
    ((row_id, error),) = faults
    assert (row_id, error.code) == (1, ErrorCode.INVALID_PROMPT)
    assert "message 1 of 1" in error.message


def test_the_images_of_a_prompt_stand_before_its_text_and_those_of_messages_where_they_are() -> None:
    photo, link = {"content": b"\xff\xd8", "source": None}, {"content": None, "source": "/a.png"}
    parts = [{"text": "This", "image": None}, {"text": None, "image": link}]
    texts = [{"text": "a", "image": None}, {"text": "b", "image": None}]
    turns = [
        {"role": "user", "content": None, "parts": parts},
        {"role": "user", "content": None, "parts": texts},
    ]
    batch = request_batch(
        ["what?", None, "plain", " "],
        messages=[None, turns, None, None],
        images=[[photo, link], None, [], [photo]],
    )
    requests, faults = requests_of(batch, job=Sampling(), system=None, id_prefix="")
    assert faults == []
    shown, chat, plain, blank = requests
    assert (shown.prompt, shown.messages) == (
        None,
        (Message(role="user", content=(Image(content=b"\xff\xd8"), Image(source="/a.png"), "what?")),),
    )
    assert chat.messages == (
        Message(role="user", content=("This", Image(source="/a.png"))),
        Message(role="user", content="a\nb"),
    )
    assert (plain.prompt, plain.messages, blank.prompt) == ("plain", None, " ")


@pytest.mark.parametrize(
    ("columns", "code", "says"),
    [
        ({"images": [[{"content": None, "source": None}]]}, ErrorCode.INVALID_IMAGE, "image 1 of 1 is null"),
        ({"images": [[{"content": b"x", "source": None}, None]]}, ErrorCode.INVALID_IMAGE, "image 2 of 2"),
        (
            {"messages": [[{"role": "user", "content": None, "parts": [{"text": None, "image": None}]}]]},
            ErrorCode.INVALID_PROMPT,
            "part 1 of 1",
        ),
    ],
)
def test_a_missing_image_is_an_error_row(columns: dict[str, list[Any]], code: ErrorCode, says: str) -> None:
    batch = request_batch([None if "messages" in columns else "what?"], **columns)
    requests, ((_, error),) = requests_of(batch, job=Sampling(), system=None, id_prefix="")
    assert requests == []
    assert error.code == code
    assert says in error.message


def test_text_that_is_not_utf8_is_an_error_row_and_its_neighbours_are_fine() -> None:
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 4, 6, 10)))
    prompts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"good\xff\xfefine"))
    good = request_batch(["", "", ""])
    columns = [good["row_id"], prompts, *(good[name] for name in REQUEST_SCHEMA.names[2:])]
    batch = pa.RecordBatch.from_arrays(columns, schema=REQUEST_SCHEMA)
    requests, faults = requests_of(batch, job=Sampling(), system=None, id_prefix="")
    assert [request.prompt for request in requests] == ["good", "fine"]
    assert [(row_id, error.code) for row_id, error in faults] == [(1, ErrorCode.INVALID_PROMPT)]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"seed": -3}, "seed is -3"),
        ({"temperature": float("inf")}, "temperature is inf"),
    ],
)
def test_an_override_out_of_range_is_an_error_row(override: dict[str, float], says: str) -> None:
    requests, faults = requests_of(
        request_batch(["a"], overrides=[override]), job=Sampling(), system=None, id_prefix=""
    )
    assert requests == []
    assert faults[0][1].code == ErrorCode.INVALID_PARAMETER
    assert says in faults[0][1].message


def test_a_row_s_seed_depends_only_on_the_job_s_seed_and_the_prompt() -> None:
    turn = (Message(role="user", content="a"),)
    seeds = [row_seed(1, "a", None), row_seed(2, "a", None), row_seed(1, "b", None), row_seed(1, None, turn)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(1, "a", None) == 8210095554241109847  # it must not change between versions or machines


def test_a_row_s_seed_depends_on_its_images() -> None:
    def seed(content: bytes) -> int:
        return row_seed(1, None, (Message(role="user", content=(Image(content=content), "a")),))

    assert seed(b"x") == seed(b"x") != seed(b"y")


def test_a_row_s_own_seed_is_taken_as_it_is_and_greedy_rows_need_none() -> None:
    batch = request_batch(["a", "a"], overrides=[{"seed": 5}, {"temperature": 0.0}])
    requests, _ = requests_of(batch, job=Sampling(temperature=1.0, seed=1), system=None, id_prefix="")
    assert [request.sampling.seed for request in requests] == [5, 1]


def test_text_with_a_lone_surrogate_does_not_end_the_session() -> None:
    done = Completion(request_id="1:0", text="a\ud800b", finish_reason="stop")
    batch = completion_batch([FinishedRow(row_id=0, completion=done, completed_at_us=0)])
    assert batch.schema == COMPLETION_SCHEMA
    assert batch["text"].to_pylist() == ["a?b"]


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def test_embeddings_become_lists_of_floats_and_rows_without_one_null() -> None:
    array = embedding_array([floats(1.5, -2.0), None, floats(0.25), None])
    assert array.type == COMPLETION_SCHEMA.field("embedding").type
    assert array.to_pylist() == [[1.5, -2.0], None, [0.25], None]
    array.validate(full=True)
    assert embedding_array([None, None]).to_pylist() == [None, None]
    assert embedding_array([]).to_pylist() == []


def test_an_embedding_counts_with_its_bytes_until_it_is_delivered() -> None:
    rows = [
        FinishedRow(
            row_id=0, completion=Completion(request_id="1:0", embedding=floats(*each)), completed_at_us=0
        )
        for each in ([], range(4096))
    ]
    assert rows[1].output_size() - rows[0].output_size() == 4 * 4096
    assert completion_batch(rows)["embedding"].to_pylist()[1] == list(range(4096))
