"""Choices by their tokens: what is asked, and how probable each choice is."""

from math import log

import pytest

from pipemax.answers.choice_tree import ChoiceTree

END = 99


def tree(*choices: str) -> ChoiceTree:
    """A letter is a token."""
    return ChoiceTree.of(choices, lambda text: [ord(letter) for letter in text], [END])


@pytest.mark.parametrize(
    ("choices", "shared", "branches"),
    [
        (("bug", "question"), "", {ord("b"): "bug", ord("q"): "question"}),
        (('{"a": 1}', '{"a": 2}'), '{"a": ', {ord("1"): '{"a": 1}', ord("2"): '{"a": 2}'}),
        (("lib", "libs"), "lib", {END: "lib", ord("s"): "libs"}),
    ],
)
def test_only_where_choices_part_is_asked_and_a_choice_that_begins_another_parts_by_its_end(
    choices: tuple[str, ...], shared: str, branches: dict[int, str]
) -> None:
    (node,) = tree(*choices).nodes
    assert (node.prefix, node.branches) == (tuple(map(ord, shared)), branches)


def test_probabilities_are_products_along_the_way_and_sum_to_one() -> None:
    made = tree("aa", "ab", "c")
    _, second = made.nodes
    assert (second.prefix, second.branches) == ((ord("a"),), {ord("a"): "aa", ord("b"): "ab"})
    # Other tokens had most of the probability: only the choices' shares count.
    scores = [
        {ord("a"): log(0.06), ord("c"): log(0.02)},
        {ord("a"): log(0.1), ord("b"): log(0.3)},
    ]
    found = made.probabilities(scores)
    assert found == pytest.approx({"aa": 0.75 * 0.25, "ab": 0.75 * 0.75, "c": 0.25})


def test_a_place_that_the_model_never_reaches_gives_no_nan() -> None:
    infinite = float("-inf")
    found = tree("a", "b").probabilities([{ord("a"): infinite, ord("b"): infinite}])
    assert found == {"a": 0.5, "b": 0.5}


def test_choices_that_the_tokenizer_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="'A' and 'a' are the same tokens"):
        ChoiceTree.of(("A", "a"), lambda text: [ord(text.lower())], [END])
    with pytest.raises(ValueError, match="has no tokens"):
        ChoiceTree.of(("a", "b"), lambda text: [], [END])
