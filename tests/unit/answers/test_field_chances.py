"""How probable each field of a JSON answer was, by the tokens that write it."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.answers.field_chances import field_probabilities


def found(text: str, *pieces: tuple[str, float]) -> dict[str, float] | None:
    texts, chances = zip(*pieces, strict=True)
    fields = field_probabilities(text, texts, [math.log(chance) for chance in chances])
    return None if fields is None else dict(fields)


def test_a_field_is_as_probable_as_the_tokens_that_write_it_and_end_it() -> None:
    pieces = [
        ('{"', 1.0),
        ("kind", 0.9),  # a name is no part of a value
        ('": "', 0.5),  # but the quote that begins one is
        ("bug", 0.8),
        ('", "', 0.5),
        ("price", 1.0),
        ('":', 1.0),
        (" 1", 0.5),
        ("2", 0.5),
        ("}", 0.1),
        ("<|end|>", 0.7),
    ]
    assert found('{"kind": "bug", "price": 12}', *pieces) == pytest.approx(
        {"kind": 0.5 * 0.8 * 0.5, "price": 0.5 * 0.5 * 0.1}
    )


def test_tokens_may_lack_the_space_before_them() -> None:
    pieces = [('{"a":', 1.0), ('"two', 0.5), ("words", 0.5), ('"}', 1.0)]
    assert found('{"a": "two words"}', *pieces) == pytest.approx({"a": 0.25})


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("[1]", ["[1]"]),
        ("plain", ["plain"]),
        ('{"a": 1', ['{"a": 1']),
        ("", []),
        ('{"a": 1}', ['{"b": 1}']),
        ('{"a": 1}', ['{"a"']),
    ],
)
def test_what_is_no_object_of_these_tokens_has_no_fields(text: str, pieces: list[str]) -> None:
    assert field_probabilities(text, pieces, [0.0] * len(pieces)) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    values=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_each_property_is_found_whatever_it_holds(
    values: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    fields = field_probabilities(text, list(text), [-0.001] * len(text))
    assert fields is not None
    assert [name for name, _ in fields] == [*values]
    for name, chance in fields:
        # At least its own characters and what ends it; more only by the space between.
        own = len(json.dumps(values[name], indent=indent, ensure_ascii=ascii_only))
        assert -math.log(chance) >= 0.001 * (own if indent is None else 1)
