"""Choices by their tokens: what is asked, and how probable each choice is."""

from math import log

import pytest

from pipemax.answers.choice_tree import ChoiceTree

END = 99


def tree(*choices: str) -> ChoiceTree:
    """A letter is a token."""
    return ChoiceTree.of(choices, lambda text: [ord(letter) for letter in text], [END])


def test_choices_with_different_first_tokens_part_at_one_place() -> None:
    (node,) = tree("bug", "question", "praise").nodes
    assert node.prefix == ()
    assert node.branches == {ord("b"): "bug", ord("q"): "question", ord("p"): "praise"}


def test_what_all_choices_share_is_not_asked_for() -> None:
    (node,) = tree('{"a": 1}', '{"a": 2}').nodes
    assert node.prefix == tuple(map(ord, '{"a": '))


def test_a_choice_that_begins_another_one_is_told_apart_by_the_end_token() -> None:
    (node,) = tree("lib", "libs").nodes
    assert node.branches == {END: "lib", ord("s"): "libs"}


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
