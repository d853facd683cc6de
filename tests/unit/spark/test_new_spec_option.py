"""``--new-spec`` with a value, without one, and from Python."""

import pytest

from pipemax_spark.errors import JobError, NewSpec
from pipemax_spark.job.option_values import with_new_spec
from pipemax_spark.storage.spec_properties import (
    is_replacing,
    replaced_by,
    spec_property,
    spec_since,
    spec_texts,
)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--new-spec"], ["--new-spec=stack"]),
        (["--new-spec", "--limit", "5"], ["--new-spec=stack", "--limit", "5"]),
        (["--limit", "5", "--new-spec", "replace"], ["--limit", "5", "--new-spec", "replace"]),
        (["--new-spec=replace"], ["--new-spec=replace"]),
        ([], []),
    ],
)
def test_the_option_without_a_value_keeps_the_old_rows_as_it_did(given: list[str], read: list[str]) -> None:
    assert with_new_spec(given) == read


def test_python_gives_true_or_text() -> None:
    assert [NewSpec.of(value) for value in (True, False, None, "replace")] == [
        NewSpec.STACK,
        None,
        None,
        NewSpec.REPLACE,
    ]
    with pytest.raises(JobError, match="new-spec is 'both'; give 'stack' "):
        NewSpec.of("both")


def test_a_replaced_spec_is_unknown_until_it_comes_back_as_of_another_run() -> None:
    properties = spec_property("one", "text", "run-1") | spec_property("two", "other", "run-2")
    assert list(spec_texts(properties)) == ["one", "two"]
    assert not is_replacing(properties, "two")
    properties |= replaced_by(properties, "two")
    assert list(spec_texts(properties)) == ["two"]
    assert is_replacing(properties, "two")
    assert replaced_by(properties, "two") == {}, "nothing is to be set twice"
    assert spec_since(properties, "one") == "run-1"
    properties |= spec_property("one", "text", "run-3")
    assert list(spec_texts(properties)) == ["two", "one"]
    assert spec_since(properties, "one") == "run-3"
    assert not is_replacing(properties, "two")
