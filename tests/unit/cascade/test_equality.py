"""When two answers are the same, by kind of answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.cascade.equality import Answers, Equality
from pipemax_spark.cascade.json_sets import Schema

TEXT = Equality(answers=Answers.TEXT)
JSON = Equality(answers=Answers.JSON)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "topic": {"type": "string"},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "$defs": {"step": {"properties": {"tools": {"type": "array", "uniqueItems": True}}}},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def classes(label: str, *labels: str, excludes: bool = True) -> str:
    return json.dumps({"excludes": excludes, "label": label, "labels": labels})


def by_schema(**settings: Any) -> Equality:
    return Equality(answers=Answers.JSON, schema=Schema.of(SCHEMA), **settings)


@pytest.mark.parametrize(
    ("small", "large", "differ"),
    [
        ("bug", "bug", False),
        (" bug\n", "bug", False),
        ("café", "cafe\N{COMBINING ACUTE ACCENT}", False),
        ("bug", "Bug", True),
        ("a b", "a  b", True),
        ("bug", None, True),
        (None, None, True),
        ("", "", False),
    ],
)
def test_texts_are_equal_after_nfc_without_space_around_them(
    small: str | None, large: str | None, differ: bool
) -> None:
    assert TEXT.differ(small, large) is differ


@pytest.mark.parametrize(
    ("small", "large", "tolerance", "differ"),
    [
        (0.5, 0.5, "0", False),
        (0.3, 0.4, "0.1", False),  # the floats are more than 0.1 apart
        (0.3, 0.41, "0.1", True),
        (float("nan"), float("nan"), "0.1", True),
        (float("inf"), float("inf"), "0", False),
        (float("inf"), 1.0, "1000", True),
        ("7", "7.0", "0", False),
        ("seven", "7", "10", True),
    ],
)
def test_scores_are_equal_within_the_tolerance_in_decimals(
    small: float, large: float, tolerance: str, differ: bool
) -> None:
    assert Equality(answers=Answers.NUMBER, tolerance=tolerance).differ(small, large) is differ


@pytest.mark.parametrize(
    ("small", "large", "differ"),
    [
        ('{"a": 1, "b": 2}', '{"b":2.0,"a":1e0}', False),
        ('{"a": 1}', '{"a": 1, "b": null}', True),
        ('{"a": true}', '{"a": 1}', True),
        ('{"a": 0}', '{"a": false}', True),
        ('{"a": null}', '{"a": 0}', True),
        ('{"a": "1"}', '{"a": 1}', True),
        ('{"a": -0.0}', '{"a": 0}', False),
        ('{"a": "x "}', '{"a": "x"}', False),
        ("[1, 2]", "[2, 1]", True),
        ("[1, 2]", "[1, 2, 3]", True),
        ('{"a": 1e400}', '{"a": 1e500}', True),
        ('{"a": 0.1}', '{"a": 0.1000000000000000000001}', True),
        ('{"a": NaN}', '{"a": NaN}', True),
        ('{"a": ', '{"a": ', True),
        ("[" * 100_000, "[" * 100_000, True),
        ("9" * 5_000, "9" * 5_000, False),
    ],
)
def test_json_is_equal_by_its_values(small: str, large: str, differ: bool) -> None:
    assert JSON.differ(small, large) is differ


@given(VALUES)
def test_a_value_equals_itself_however_it_is_written(value: object) -> None:
    compact, spread = json.dumps(value, sort_keys=True), json.dumps(value, indent=2, ensure_ascii=False)
    assert not JSON.differ(compact, spread)
    assert not by_schema().differ(compact, spread)


@given(VALUES, VALUES)
def test_equality_has_no_direction(one: object, other: object) -> None:
    first, second = json.dumps(one), json.dumps(other)
    assert JSON.differ(first, second) == JSON.differ(second, first)


@pytest.mark.parametrize(
    ("small", "large", "differ"),
    [
        ('{"tags": ["one", "two", "two"]}', '{"tags": ["two", "one"]}', False),
        ('{"tags": ["a", "b"]}', '{"tags": ["a", "c"]}', True),
        ('{"steps": [{"tools": [1, 2]}]}', '{"steps": [{"tools": [2, 1]}]}', False),
        ('{"steps": [{}, {"tools": []}]}', '{"steps": [{"tools": []}, {}]}', True),
        ('{"next": {"next": {"tags": ["a", "b"]}}}', '{"next": {"next": {"tags": ["b", "a"]}}}', False),
    ],
)
def test_an_array_is_a_set_where_the_schema_says_so(small: str, large: str, differ: bool) -> None:
    assert by_schema().differ(small, large) is differ


def test_a_schema_that_refers_to_itself_is_followed_to_an_end() -> None:
    assert not Schema.of({"$ref": "#"}).is_set
    assert Schema.of({"anyOf": [{"$ref": "#"}, {"uniqueItems": True}]}).is_set


def test_near_numbers_of_a_set_are_paired() -> None:
    numbers = Schema.of({"type": "array", "uniqueItems": True})
    near = Equality(answers=Answers.JSON, schema=numbers, tolerance="0.1")
    assert not near.differ("[10, 9.05, 1]", "[9, 1.1, 10.1]")
    assert near.differ("[10, 9, 1]", "[9, 1.2, 10]")


def test_fields_of_tuples_and_of_maps_are_followed() -> None:
    tags = {"type": "array", "uniqueItems": True}
    schema = Schema.of({"prefixItems": [tags], "items": {"additionalProperties": tags}})
    sets = Equality(answers=Answers.JSON, schema=schema)
    assert not sets.differ('[["a", "b"], {"x": [1, 2]}]', '[["b", "a"], {"x": [2, 1]}]')


def test_only_the_named_fields_are_compared() -> None:
    named = by_schema(fields=("topic", "tags"), tolerance="0.01")
    assert not named.differ('{"topic": "a", "price": 1}', '{"topic": "a", "price": 9}')
    assert not named.differ('{"topic": "a", "tags": [1, 2]}', '{"tags": [2, 1], "topic": "a"}')
    assert named.differ('{"topic": "a"}', '{"topic": "b"}')
    assert named.differ('{"topic": "a", "tags": []}', '{"topic": "a"}')
    assert named.differ("[]", "[]")


def test_numbers_in_json_may_be_a_tolerance_apart() -> None:
    near = by_schema(tolerance="0.01")
    assert not near.differ('{"price": 1.00}', '{"price": 1.01}')
    assert near.differ('{"price": 1.00}', '{"price": 1.0101}')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answers": Answers.TEXT, "tolerance": "0.1"}, "agree-tolerance is for numbers"),
        ({"answers": Answers.NUMBER, "tolerance": "-1"}, "agree-tolerance is '-1'; give a number from 0"),
        ({"answers": Answers.NUMBER, "tolerance": "some"}, "agree-tolerance is 'some'"),
        ({"answers": Answers.NUMBER, "tolerance": "nan"}, "agree-tolerance is 'nan'"),
        ({"answers": Answers.TEXT, "fields": ("a",)}, "agree-fields is for answers with a JSON schema"),
        (
            {"answers": Answers.JSON, "schema": Schema.of(SCHEMA), "fields": ("topic", "colour")},
            "agree-fields names 'colour', which the schema has not; it has 'topic', 'price'",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_by_the_options_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Equality(**settings)


@pytest.mark.parametrize(
    ("small", "large", "differ"),
    [
        (classes("bug"), classes("bug", "bug"), False),
        (classes("bug", "bug"), classes("praise", "praise"), True),
        (
            classes("bug", "bug", "slow", excludes=False),
            classes("slow", "bug", "slow", excludes=False),
            False,
        ),
        (classes("bug", "bug", excludes=False), classes("bug", "bug", "slow", excludes=False), True),
        (classes("bug", excludes=False), classes("slow", excludes=False), False),
        # One of them adds up to 1 by chance.
        (classes("bug", "bug", excludes=True), classes("bug", "bug", excludes=False), False),
        (classes("bug", "bug"), None, True),
    ],
)
def test_classes_are_the_likeliest_one_or_a_set_of_labels(
    small: str, large: str | None, differ: bool
) -> None:
    equality = Equality(answers=Answers.CLASSES)
    assert equality.differ(small, large) is equality.differ(large, small) is differ


def test_classes_are_shown_as_labels() -> None:
    equality = Equality(answers=Answers.CLASSES)
    shown = map(
        equality.shown,
        (classes("bug"), classes("bug", "bug", "slow", excludes=False), classes("bug", excludes=False)),
    )
    assert [*shown] == ["bug", "bug, slow", "(none)"]
