"""What decides a row's answer, and only that, decides its key."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipemax.api import Completion, GenerationRequest, Image, Message, Sampling
from pipemax.serve.rows.result_cache import KEY_BYTES, ResultCache, cache_key

_ROW = GenerationRequest(request_id="1:1", prompt="hello")


@pytest.mark.parametrize(
    "other",
    [
        replace(_ROW, prompt="hello "),
        replace(_ROW, prompt=None),
        replace(_ROW, prompt=None, messages=(Message(role="user", content="hello"),)),
        replace(_ROW, messages=()),
        replace(_ROW, system="hello"),
        *(
            replace(_ROW, sampling=replace(Sampling(), **{name: value}))
            for name, value in {
                "max_tokens": 1,
                "temperature": 0.5,
                "top_p": 0.5,
                "top_k": 1,
                "stop": ("x",),
                "seed": 0,
                "response_format": "{}",
            }.items()
        ),
    ],
)
def test_whatever_decides_the_answer_changes_the_key(other: GenerationRequest) -> None:
    assert cache_key("engine", other) != cache_key("engine", _ROW)


def test_a_result_key_depends_only_on_engine_prompt_and_sampling() -> None:
    key = cache_key("engine", _ROW)
    assert len(key) == KEY_BYTES
    assert cache_key("other engine", _ROW) != key
    assert cache_key("engine", replace(_ROW, request_id="2:7")) == key
    assert cache_key("engine", replace(_ROW, sampling=Sampling(temperature=0, top_p=1))) == key


def test_the_bytes_of_an_image_are_part_of_the_key_and_so_is_a_file_s_version(tmp_path: Path) -> None:
    def key(image: Image) -> bytes:
        turn = Message(role="user", content=(image, "hello"))
        return cache_key("engine", replace(_ROW, prompt=None, messages=(turn,)))

    photo = tmp_path / "a.png"
    photo.write_bytes(b"x")
    at_path = key(Image(source=str(photo)))
    assert key(Image(content=b"x")) == key(Image(content=b"x"))
    assert len({key(Image(content=b"x")), key(Image(content=b"y")), at_path}) == 3
    photo.write_bytes(b"xy")
    assert key(Image(source=str(photo))) != at_path


def test_a_lone_surrogate_has_a_key() -> None:
    assert len(cache_key("engine", replace(_ROW, prompt="\ud800"))) == KEY_BYTES


def test_an_embedding_takes_its_bytes_of_the_cache() -> None:
    cache = ResultCache(50_000)
    for number in range(3):
        cache.keep(bytes([number]), Completion(request_id="1:1", embedding=bytes(20_000)))
    assert [cache.find(bytes([number]), request_id="1:2") is None for number in range(3)] == [
        True,
        False,
        False,
    ]
