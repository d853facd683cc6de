"""A row's way through its asks: what is asked next, and which completion comes out."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import pytest

from pipemax.answers.asks import Ask, Prompt, Reply, Split
from pipemax.answers.book import RowBook
from pipemax.answers.choice_tree import ChoiceTree
from pipemax.answers.row import Row, RowTools, seed_of
from pipemax.generation import Completion, GenerationRequest, RequestError, Sampling
from pipemax.wire import ErrorCode

PROMPT = [1, 2, 3]
END = 99
SCHEMA = json.dumps(
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5}}, "required": ["n"]}
)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class HashThinking:
    """Thinking ends with a '#'; a prompt that ends with 0 has none."""

    def is_over(self, prompt: Sequence[int], sampling: Sampling) -> bool:
        return prompt[-1] == 0

    def split(self, prompt: Sequence[int], reply: Reply, sampling: Sampling) -> Split:
        if self.is_over(prompt, sampling):
            return Split(reasoning=None, answer=reply.text, answer_tokens=len(reply.token_ids))
        thought, mark, answer = reply.text.partition("#")
        return Split(reasoning=thought, answer=answer if mark and answer else None, answer_tokens=len(answer))


@dataclass
class Model:
    """Answers each ask, and keeps them."""

    answer: Callable[[Ask], Reply]
    thinking: HashThinking | None = None
    max_model_len: int = 1_000

    def __post_init__(self) -> None:
        self.asks: list[Ask] = []
        self.encoded: list[GenerationRequest] = []

    def encode(self, request: GenerationRequest) -> Prompt | RequestError:
        self.encoded.append(request)
        return Prompt([7] * (len(PROMPT) + 1))

    def fault_of_length(self, token_ids: Sequence[int]) -> RequestError | None:
        message = f"the prompt has {len(token_ids)} tokens"
        is_long = len(token_ids) >= self.max_model_len
        return RequestError(code=ErrorCode.PROMPT_TOO_LONG, message=message) if is_long else None

    def run(self, **sampling: Any) -> Completion:
        tools = RowTools(
            encode=self.encode,
            tree_of=lambda choices: ChoiceTree.of(choices, letters, [END]),
            thinking=self.thinking,
            fault_of_length=self.fault_of_length,
        )
        request = GenerationRequest(request_id="r", prompt="Say", sampling=Sampling(**sampling))
        row = Row(request, Prompt(PROMPT), tools)
        waiting = row.begin()
        while waiting:
            ask = waiting.pop(0)
            self.asks.append(ask)
            waiting += row.take(ask.ask_id, self.answer(ask))
        assert row.completion is not None
        assert row.open_asks == []
        return row.completion


def text(answer: str, finish_reason: str = "stop") -> Reply:
    return Reply(text=answer, token_ids=tuple(letters(answer)), finish_reason=finish_reason)


def by_attempt(*answers: Reply) -> Callable[[Ask], Reply]:
    left = list(answers)
    return lambda ask: left.pop(0)


def test_a_plain_row_is_one_ask_with_its_own_id_and_seed() -> None:
    model = Model(lambda ask: text("yes"))
    completion = model.run(temperature=1.0, seed=5)
    (ask,) = model.asks
    assert (ask.ask_id, ask.prompt.token_ids, ask.seed, ask.allowed) == ("r", PROMPT, 5, ())
    assert (completion.text, completion.completion_tokens, completion.prompt_tokens) == ("yes", 3, 3)
    assert (completion.attempts, completion.samples) == (1, None)


@pytest.mark.parametrize("logprobs", [False, True])
def test_choices_whose_common_beginning_does_not_fit_are_too_long(logprobs: bool) -> None:
    model = Model(chooses(lambda ask: "x"), max_model_len=8)
    completion = model.run(choice=("about x", "about y"), logprobs=logprobs)
    assert completion.error is not None
    assert completion.error.code == ErrorCode.PROMPT_TOO_LONG
    assert completion.error.message == (
        "the prompt has 9 tokens. What the choices begin with is part of these tokens"
    )
    assert model.asks == [], "vLLM would refuse it as the engine's fault"


def test_probabilities_that_vllm_cannot_return_are_never_left_out_in_silence() -> None:
    choices = tuple(chr(200 + number) for number in range(129))
    with pytest.raises(ValueError, match="logprobs can score at most 128"):
        Model(chooses(lambda ask: "x")).run(choice=choices, logprobs=True)


def chooses(letter_of: Callable[[Ask], str], **weights: float) -> Callable[[Ask], Reply]:
    def answer(ask: Ask) -> Reply:
        scores = {token: log(weights.get(chr(token), 0.001)) for token in ask.allowed}
        return Reply(
            token_ids=(ord(letter_of(ask)),),
            finish_reason="length",
            scores=scores if ask.with_scores else None,
        )

    return answer


def test_a_choice_is_asked_for_only_where_choices_part() -> None:
    model = Model(chooses(lambda ask: "c" if len(model.asks) == 1 else "r"))
    completion = model.run(choice=("call", "cry", "wait"))
    assert [(ask.prompt.token_ids, {chr(token) for token in ask.allowed}) for ask in model.asks] == [
        (PROMPT, {"c", "w"}),
        ([*PROMPT, ord("c")], {"a", "r"}),
    ]
    assert (completion.text, completion.finish_reason, completion.completion_tokens) == ("cry", "stop", 2)
    assert not any(ask.with_scores for ask in model.asks)


def test_with_logprobs_each_choice_has_its_probability_and_the_likeliest_is_the_answer() -> None:
    model = Model(chooses(lambda ask: chr(min(ask.allowed)), c=0.6, w=0.4, a=0.5, r=0.5))
    completion = model.run(choice=("call", "cry", "wait"), logprobs=True)
    assert dict(completion.probabilities or ()) == pytest.approx({"call": 0.3, "cry": 0.3, "wait": 0.4})
    assert completion.text == "wait", "decoding greedily would have begun with c"
    assert (completion.logprob_sum, completion.completion_tokens) == (None, 2)


def test_an_answer_s_logprobs_are_summed() -> None:
    model = Model(lambda ask: replace(text("ab"), logprobs=[-1.0, -3.0]))
    completion = model.run(logprobs=True)
    assert (completion.logprob_sum, completion.logprob_mean) == (-4.0, -2.0)


def test_an_invalid_answer_is_tried_again_with_another_seed() -> None:
    model = Model(by_attempt(text('{"n": 1', "length"), text('{"n": 1}'), text('{"n": 7}')))
    completion = model.run(response_format=SCHEMA, attempts=4, temperature=1.0, seed=3)
    assert (completion.text, completion.attempts, completion.error) == ('{"n": 7}', 3, None)
    assert completion.completion_tokens == 7 + 8 + 8, "what all attempts cost"
    seeds = [ask.seed for ask in model.asks]
    assert seeds == [3, seed_of(3, 0, 2, 0), seed_of(3, 0, 3, 0)]
    assert len(set(seeds)) == 3


def test_a_row_that_never_gets_a_valid_answer_is_an_error_with_the_last_one() -> None:
    model = Model(lambda ask: text('{"n": 1}'))
    completion = model.run(response_format=SCHEMA, attempts=2, temperature=1.0)
    assert completion.error is not None
    assert completion.error.code == ErrorCode.RESPONSE_FORMAT
    assert "does not match the schema: at $.n: 1 is less than the minimum of 5" in completion.error.message
    assert (completion.text, completion.attempts) == ('{"n": 1}', 2)


def test_a_cut_text_is_tried_again_and_stays_a_good_row_if_it_is_always_cut() -> None:
    model = Model(lambda ask: text("and so on", "length"))
    completion = model.run(attempts=3, temperature=1.0)
    assert (completion.error, completion.finish_reason, completion.attempts) == (None, "length", 3)


def test_a_repetition_is_tried_again_and_stays_a_good_row_unless_the_answer_must_follow_something() -> None:
    model = Model(by_attempt(text("no no no", "repetition"), text("a cat")))
    completion = model.run(stop_repetition=3, attempts=2, temperature=1.0)
    assert (completion.text, completion.finish_reason, completion.attempts) == ("a cat", "stop", 2)
    always = Model(lambda ask: text("no no no", "repetition"))
    completion = always.run(stop_repetition=3)
    assert (completion.text, completion.finish_reason, completion.error) == ("no no no", "repetition", None)
    completion = always.run(stop_repetition=3, regex="[a-z ]{20}")
    assert completion.error is not None
    assert "ended before it was complete, because it repeated itself" in completion.error.message


def test_thinking_that_repeats_itself_is_an_error_that_names_the_remedy() -> None:
    completion = Model(lambda ask: text("hmmm", "repetition"), HashThinking()).run(stop_repetition=4)
    assert completion.error is not None
    assert completion.error.code == ErrorCode.REASONING_UNFINISHED
    assert completion.error.message.endswith("because it repeated itself; set thinking_tokens")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stop_repetition": 1}, "stop_repetition is 1, must be 0 \\(off\\) or at least 2"),
        ({"thinking_tokens": -1}, "thinking_tokens is -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, must be at least 0 and at most max_tokens, 8"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, must be above 0"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids has -1"),
        ({"bad_words": (" ",)}, "bad_words has an empty or blank text"),
        ({"bad_words": ("a",), "regex": "a+"}, "bad_words and regex are given"),
        ({"frequency_penalty": 1.0, "choice": ("a", "b")}, "frequency_penalty and choice are given"),
        ({"task": "embed", "min_p": 0.5}, "task embed generates no text, so min_p has no meaning"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sampling(**settings)


def test_the_error_is_shown_to_the_model() -> None:
    model = Model(lambda ask: text("yes"))
    completion = model.run(regex="yes|no", attempts=2, attempts_show_error=True)
    assert completion.attempts == 1, "an answer that ended by itself follows its regular expression"
    model = Model(by_attempt(text("ye", "length"), text("yes")))
    completion = model.run(regex="yes|no", attempts=2, attempts_show_error=True)
    assert (completion.text, completion.attempts, completion.prompt_tokens) == ("yes", 2, 3)
    (shown,) = model.encoded
    assert shown.messages is not None
    assert [(turn.role, turn.content) for turn in shown.messages] == [
        ("user", "Say"),
        ("assistant", "ye"),
        (
            "user",
            "Your answer was cut at max_tokens before it was complete. Answer again, with nothing but a valid answer.",
        ),
    ]
    assert model.asks[1].prompt.token_ids == [7] * 4


def test_samples_vote_and_invalid_ones_do_not_count() -> None:
    answers = ['{"n": 6}', '{"n":  7}', '{"n": 1}', '{"n": 7}']
    model = Model(lambda ask: text(answers[len(model.asks) - 1]))
    completion = model.run(response_format=SCHEMA, n=4, temperature=1.0, seed=1)
    assert (completion.text, completion.agreement) == ('{"n":  7}', 0.5)
    assert completion.samples == ('{"n": 6}', '{"n":  7}', None, '{"n": 7}')
    assert len({ask.seed for ask in model.asks}) == 4
    assert completion.completion_tokens == sum(map(len, answers))


def test_thinking_is_split_off_and_counted() -> None:
    model = Model(lambda ask: text("hmm#42"), HashThinking())
    completion = model.run(include_reasoning=True)
    assert (completion.reasoning, completion.text, completion.reasoning_tokens) == ("hmm", "42", 4)
    completion = model.run(include_reasoning=False)
    assert (completion.reasoning, completion.text, completion.reasoning_tokens) == (None, "42", 4)


def test_thoughts_do_not_count_in_an_answer_s_logprobs() -> None:
    model = Model(lambda ask: replace(text("hm#ok"), logprobs=[-9.0, -9.0, -9.0, -1.0, -3.0]), HashThinking())
    completion = model.run(include_reasoning=True, logprobs=True)
    assert (completion.text, completion.logprob_sum, completion.logprob_mean) == ("ok", -4.0, -2.0)


def test_thinking_that_is_cut_is_an_error_with_what_was_cut() -> None:
    model = Model(by_attempt(text("hmmm", "length"), text("hm#ok")), HashThinking())
    completion = model.run(include_reasoning=True)
    assert completion.error is not None
    assert completion.error.code == ErrorCode.REASONING_UNFINISHED
    assert (completion.reasoning, completion.text) == ("hmmm", None)
    assert "max_tokens cut the thinking after 4 tokens" in completion.error.message


def test_thinking_that_is_cut_is_worth_another_attempt() -> None:
    model = Model(by_attempt(text("hmmm", "length"), text("hm#ok")), HashThinking())
    completion = model.run(include_reasoning=True, attempts=2, temperature=1.0)
    assert (completion.text, completion.attempts, completion.reasoning_tokens) == ("ok", 2, 4 + 3)


def test_a_choice_after_thinking_is_one_ask_and_its_probabilities_are_those_behind_the_thinking() -> None:
    branch = chooses(lambda ask: "y", y=0.2, n=0.6)
    model = Model(lambda ask: branch(ask) if ask.allowed else text("hm#yes"), HashThinking())
    assert model.run(choice=("yes", "no")).text == "yes"
    assert [ask.allowed for ask in model.asks] == [()]
    completion = model.run(choice=("yes", "no"), logprobs=True)
    assert model.asks[-1].prompt.token_ids == [*PROMPT, *letters("hm#")]
    assert dict(completion.probabilities or ()) == pytest.approx({"yes": 0.25, "no": 0.75})
    assert completion.text == "no"


def test_what_the_engine_refuses_ends_the_row() -> None:
    refusal = RequestError(code=ErrorCode.ENGINE_ERROR, message="no")
    model = Model(lambda ask: Reply(error=refusal))
    assert model.run(choice=("a", "b"), attempts=3, temperature=1.0).error == refusal
    assert len(model.asks) == 1


def test_an_aborted_row_gives_back_its_open_asks_and_a_later_result_is_dropped() -> None:
    tools = RowTools(encode=lambda request: Prompt(PROMPT), tree_of=lambda _: ChoiceTree((), ()))
    book = RowBook()
    request = GenerationRequest(request_id="r", prompt="x", sampling=Sampling(n=2, temperature=1.0))
    asks = book.open("r", Row(request, Prompt(PROMPT), tools))
    assert isinstance(asks, list)
    assert book.take(asks[0].ask_id, text("a")) == ([], None)
    assert book.abort(["r", "unknown"]) == [asks[1].ask_id]
    assert book.take(asks[1].ask_id, text("b")) == ([], None)
