"""How probable each choice was, from a server's log-probabilities."""

import math

import pytest

from pipemax.endpoints.chances import Token, chances_of, listed_tokens


def _token(text: str, chance: float, **alternatives: float) -> Token:
    listed = {name.replace("_", " "): math.log(value) for name, value in alternatives.items()}
    return Token(text, math.log(chance), listed)


def test_choices_that_part_at_the_first_token_share_its_probability() -> None:
    tokens = [_token("spam", 0.6, spam=0.6, ham=0.2, other=0.1, The=0.1)]
    chances = chances_of("spam", ["spam", "ham", "other"], tokens)
    assert chances == pytest.approx({"spam": 0.6 / 0.9, "ham": 0.2 / 0.9, "other": 0.1 / 0.9})


def test_a_choice_that_parts_later_has_the_product_of_both_steps() -> None:
    tokens = [_token("very ", 0.5, good=0.5), _token("bad", 0.8, good=0.2)]
    chances = chances_of("very bad", ["very bad", "very good", "good"], tokens)
    assert chances == pytest.approx({"very bad": 0.4, "very good": 0.1, "good": 0.5})
    assert sum(chances.values()) == pytest.approx(1.0)


def test_a_choice_that_is_not_listed_has_none_of_the_probability() -> None:
    chances = chances_of("yes", ["yes", "no"], [_token("yes", 0.9, maybe=0.1)])
    assert chances == pytest.approx({"yes": 1.0, "no": 0.0})


def test_choices_behind_the_same_token_are_left_out_because_nothing_tells_them_apart() -> None:
    tokens = [_token("red", 0.5, blue=0.5)]
    chances = chances_of("red", ["red", "blue sky", "blue sea"], tokens)
    assert chances == pytest.approx({"red": 0.5})


def test_a_choice_that_only_begins_like_the_answer_is_left_out() -> None:
    chances = chances_of("no", ["no", "no idea", "yes"], [_token("no", 0.75, yes=0.25)])
    assert chances == pytest.approx({"no": 0.75, "yes": 0.25})


def test_another_spelling_of_the_answer_counts_for_the_answer() -> None:
    chances = chances_of("spam", ["spam", "ham"], [_token("sp", 0.5, spam=0.3, ham=0.2), _token("am", 1.0)])
    assert chances == pytest.approx({"spam": 0.8, "ham": 0.2})


def test_choices_within_a_json_object_are_told_apart_by_their_quotes() -> None:
    tokens = [_token('{"answer": "', 1.0), _token("no", 1.0), _token('"}', 0.7, **{" idea": 0.3})]
    chances = chances_of("no", ["no", "no idea"], tokens)
    assert chances == pytest.approx({"no": 0.7, "no idea": 0.3})


def test_an_answer_that_is_no_choice_has_no_chances() -> None:
    assert chances_of("maybe", ["yes", "no"], [_token("maybe", 1.0)]) == {}


def test_tokens_of_both_apis_are_read() -> None:
    chat = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -1.5}]}]}
    completion = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"b": -1.5}]}
    expected = [Token("a", -0.5, {"b": -1.5})]
    assert listed_tokens(chat, is_chat=True) == listed_tokens(completion, is_chat=False) == expected
    with pytest.raises(KeyError):
        listed_tokens({}, is_chat=True)
