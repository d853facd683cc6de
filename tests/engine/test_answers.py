"""Constrained answers, confidence, samples, attempts and thinking on real vLLM, under both schedulers."""

import json
import math
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipemax.api import OfflineEngine, Sampling
from pipemax.wire import ErrorCode
from tests.engine.conftest import DEMO_MODEL
from tests.engine.test_offline_engine import SCHEMA, ask, demo_prompts

LABELS: list[str] = json.loads(SCHEMA)["properties"]["section"]["enum"]
ANSWERS = tuple(f'{{"section": "{label}"}}' for label in LABELS)
THINKS = json.dumps({"thinking": True})


def log_probabilities(prompt: str, tokens: list[int]) -> torch.Tensor:
    """Of the whole vocabulary at the place of each of these tokens and behind them, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *tokens]])).logits[0]
    return torch.log_softmax(logits[len(ids) - 1 :], dim=-1)


def test_a_choice_takes_one_token_and_is_what_the_model_would_have_written(engine: OfflineEngine) -> None:
    prompts = demo_prompts(24)
    chosen = ask(engine, prompts, choice=ANSWERS)
    written = ask(engine, prompts, max_tokens=24)
    assert [completion.text for completion in chosen] == [completion.text for completion in written]
    assert {completion.completion_tokens for completion in chosen} == {1}


def test_a_choice_s_probabilities_are_those_of_transformers(engine: OfflineEngine) -> None:
    prompt = demo_prompts(1)[0]
    (completion,) = ask(engine, [prompt], choice=ANSWERS, logprobs=True)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokens = [tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS]
    shared = tokens[0][:4]
    assert all(each[:4] == shared for each in tokens)
    behind = log_probabilities(prompt, shared)[-1]
    expected = torch.softmax(torch.stack([behind[each[4]] for each in tokens]), dim=0).tolist()
    assert dict(completion.probabilities or ()) == pytest.approx(
        dict(zip(ANSWERS, expected, strict=True)), abs=1e-4
    )


def test_an_answer_s_logprob_is_that_of_transformers(engine: OfflineEngine) -> None:
    prompt = demo_prompts(1)[0]
    (completion,) = ask(engine, [prompt], max_tokens=24, logprobs=True)
    tokens = list(completion.token_ids)
    found = log_probabilities(prompt, tokens)
    expected = sum(found[place][token].item() for place, token in enumerate(tokens))
    assert completion.logprob_sum == pytest.approx(expected, abs=1e-3)
    assert completion.logprob_mean == pytest.approx(expected / len(tokens), abs=1e-3)


def test_a_field_is_as_probable_as_the_answer_of_which_the_schema_forces_all_else(
    engine: OfflineEngine,
) -> None:
    for completion in ask(engine, demo_prompts(4), max_tokens=24, response_format=SCHEMA, logprobs=True):
        ((name, probability),) = completion.field_probabilities or ()
        assert completion.logprob_sum is not None
        assert (name, probability) == ("section", pytest.approx(math.exp(completion.logprob_sum), abs=1e-3))


def test_thoughts_do_not_count_in_an_answer_s_logprob(engine: OfflineEngine) -> None:
    prompt = demo_prompts(1)[0]
    thoughtful: dict[str, Any] = {"chat_template_kwargs": THINKS, "include_reasoning": True}
    (completion,) = ask(engine, [prompt], max_tokens=24, logprobs=True, **thoughtful)
    found = log_probabilities(prompt, list(completion.token_ids))
    assert completion.reasoning_tokens == 3
    expected = sum(
        found[place][token].item() for place, token in enumerate(completion.token_ids) if place >= 3
    )
    assert completion.logprob_sum == pytest.approx(expected, abs=1e-3)
    assert completion.logprob_mean == pytest.approx(expected / (len(completion.token_ids) - 3), abs=1e-3)


def test_regular_expressions_and_grammars_are_obeyed_whatever_the_prompt(engine: OfflineEngine) -> None:
    prompts = ["Sing a song.", "{}{}{", "日本語", "Package: libfoo-dev"]
    for completion in ask(engine, prompts, max_tokens=24, regex=r"[A-Z]{2}-\d{3}"):
        assert re.fullmatch(r"[A-Z]{2}-\d{3}", completion.text or "")
    for grammar in ('root ::= "up" | "down"', 'start: "up" | "down"'):
        for completion in ask(engine, prompts, max_tokens=24, grammar=grammar):
            assert completion.text in ("up", "down")
    (cut,) = ask(engine, prompts[:1], max_tokens=2, regex=r"[A-Z]{2}-\d{3}")
    assert cut.error is not None
    assert (cut.error.code, cut.finish_reason) == (ErrorCode.RESPONSE_FORMAT, "length")


def test_samples_vote_and_the_same_seed_gives_the_same_ones(engine: OfflineEngine) -> None:
    prompts = demo_prompts(8)
    sampling = {"choice": ANSWERS, "n": 7, "temperature": 1.5, "seed": 11}
    first, again = ask(engine, prompts, **sampling), ask(engine, prompts[::-1], **sampling)[::-1]
    assert [completion.samples for completion in first] == [completion.samples for completion in again]
    assert any(len(set(completion.samples or ())) > 1 for completion in first)
    for completion in first:
        samples = completion.samples or ()
        assert len(samples) == 7
        assert completion.agreement == samples.count(completion.text) / 7
        assert max(map(samples.count, samples)) == samples.count(completion.text)


def test_cut_answers_are_tried_again_until_one_fits_or_attempts_run_out(engine: OfflineEngine) -> None:
    sampling: dict[str, Any] = {"max_tokens": 4, "regex": "[a-z]{2,30}", "temperature": 2.0, "seed": 5}
    prompts = demo_prompts(24)
    once = ask(engine, prompts, **sampling)
    tried = ask(engine, prompts, attempts=4, **sampling)
    assert sum(c.error is None for c in tried) > sum(c.error is None for c in once)
    for before, after in zip(once, tried, strict=True):
        if before.error is None:
            assert (after.text, after.attempts) == (before.text, 1)
        else:
            assert after.attempts == 4 or after.error is None
            assert after.attempts > 1
    assert [c.text for c in ask(engine, prompts, attempts=4, **sampling)] == [c.text for c in tried]


def test_a_good_first_answer_stays(engine: OfflineEngine) -> None:
    sampling: dict[str, Any] = {"max_tokens": 32, "regex": "[a-z]{2,30}", "temperature": 2.0, "seed": 5}
    prompts = demo_prompts(8)
    once, tried = ask(engine, prompts, **sampling), ask(engine, prompts, attempts=4, **sampling)
    assert {c.error for c in once} == {None}, "the longest word and its end take 31 tokens at most"
    assert [(c.text, c.attempts) for c in tried] == [(c.text, 1) for c in once]


def test_thinking_is_split_off_and_a_constraint_binds_only_the_answer(engine: OfflineEngine) -> None:
    prompts = demo_prompts(6)
    thoughtful: dict[str, Any] = {"max_tokens": 24, "chat_template_kwargs": THINKS, "include_reasoning": True}
    plain = ask(engine, prompts, **thoughtful)
    written = ask(engine, prompts, max_tokens=24)
    for completion, whole in zip(plain, written, strict=True):
        assert completion.reasoning == '{"section'
        assert f'{completion.reasoning}":{completion.text}' == whole.text
        assert completion.reasoning_tokens == 3
        assert (whole.reasoning, whole.reasoning_tokens) == (None, 0)
    for completion in ask(engine, prompts, choice=("up", "down"), logprobs=True, **thoughtful):
        assert (completion.reasoning, completion.error) == ('{"section', None)
        assert completion.text in ("up", "down")
        assert sum(dict(completion.probabilities or ()).values()) == pytest.approx(1.0)
    for completion in ask(engine, prompts, response_format='{"type": "boolean"}', **thoughtful):
        assert (completion.reasoning, completion.text) in (('{"section', "true"), ('{"section', "false"))


def test_thinking_that_never_ends_is_an_error_with_what_was_cut(engine: OfflineEngine) -> None:
    (completion,) = ask(
        engine, demo_prompts(1), max_tokens=2, chat_template_kwargs=THINKS, include_reasoning=True
    )
    assert completion.error is not None
    assert completion.error.code == ErrorCode.REASONING_UNFINISHED
    assert (completion.reasoning, completion.text) == ('{"section', None)


def test_thinking_ends_after_its_tokens_and_an_answer_follows(engine: OfflineEngine) -> None:
    prompts = demo_prompts(4)
    thoughtful: dict[str, Any] = {
        "max_tokens": 24,
        "chat_template_kwargs": THINKS,
        "include_reasoning": True,
    }
    for completion in ask(engine, prompts, thinking_tokens=0, **thoughtful):
        assert (completion.error, completion.reasoning) == (None, '{"')
        assert completion.text
    enough = ask(engine, prompts, thinking_tokens=5, **thoughtful)
    assert [row.text for row in enough] == [row.text for row in ask(engine, prompts, **thoughtful)]


def test_an_output_ends_where_it_repeats_itself(engine: OfflineEngine) -> None:
    prompts = demo_prompts(4)
    endless = ask(engine, prompts, max_tokens=120, ignore_eos=True)
    assert {(row.finish_reason, row.completion_tokens) for row in endless} == {("length", 120)}
    for row, whole in zip(
        ask(engine, prompts, max_tokens=120, ignore_eos=True, stop_repetition=3), endless, strict=True
    ):
        assert row.error is None
        assert row.token_ids == whole.token_ids[: row.completion_tokens]
        repeats = [
            end for end in range(1, 121) for size in range(1, 65) if _repeats(whole.token_ids[:end], size, 3)
        ]
        assert (row.finish_reason, row.completion_tokens) == ("repetition", repeats[0])


def _repeats(tokens: tuple[int, ...], size: int, times: int) -> bool:
    end = tokens[-size * times :]
    return len(tokens) >= size * times and end == end[:size] * times


def test_outputs_end_and_are_worded_as_they_should(engine: OfflineEngine) -> None:
    prompts = demo_prompts(4)
    plain = ask(engine, prompts, max_tokens=24)
    longer = ask(engine, prompts, max_tokens=24, min_tokens=15)
    assert all(row.completion_tokens < 15 for row in plain)
    assert all(row.completion_tokens >= 15 for row in longer)
    assert not any(
        "section" in (row.text or "") for row in ask(engine, prompts, max_tokens=24, bad_words=["section"])
    )
    third = plain[0].token_ids[2]
    (stopped,) = ask(engine, prompts[:1], max_tokens=24, stop_token_ids=[third])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", plain[0].token_ids[:3])
    (refused,) = ask(engine, prompts[:1], max_tokens=24, stop_token_ids=[10**6])
    assert refused.error is not None
    assert "out-of-vocab" in refused.error.message
    endless: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    plain, penalised = (
        ask(engine, prompts, **endless),
        ask(engine, prompts, repetition_penalty=5.0, **endless),
    )
    distinct = [sum(len({*row.token_ids}) for row in rows) for rows in (plain, penalised)]
    assert distinct[1] > 2 * distinct[0], "tokens come again less often"


def test_marks_of_thinking_in_a_row_s_text_do_not_end_it(engine: OfflineEngine) -> None:
    prompts = [f'{prompt} {{"section": "x"}}' for prompt in demo_prompts(4)]
    plain: dict[str, Any] = {"max_tokens": 24, "chat_template_kwargs": THINKS, "include_reasoning": True}
    for completion in ask(engine, prompts, choice=("up", "down"), **plain):
        assert (completion.reasoning is None, completion.text in ("up", "down")) == (False, True)


def for_parsers(*marks: str) -> tuple[Any, Any]:
    """vLLM's config of the demo model, and its tokenizer with these tokens."""
    from vllm.config import ModelConfig, VllmConfig

    config = VllmConfig()
    config.model_config = ModelConfig(str(DEMO_MODEL))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_tokens(list(marks))
    return config, tokenizer


def test_vllm_s_parsers_split_what_their_models_write() -> None:
    from pipemax.answers.asks import Reply
    from pipemax.vllm_ext.engine.thinking import VllmThinking

    config, tokenizer = for_parsers("<think>", "</think>")
    for name, output in {
        "qwen3": "<think>\nhmm, so\n</think>\n\nnet",
        "deepseek_r1": "hmm, so</think>net",
    }.items():
        thinking = VllmThinking(config, tokenizer, name=name)
        tokens = tuple(tokenizer.encode(output, add_special_tokens=False))
        told = Reply(text=output, token_ids=tokens, finish_reason="stop")
        split = thinking.split([1, 2], told, Sampling())
        assert ((split.reasoning or "").strip(), (split.answer or "").strip()) == ("hmm, so", "net"), name
        assert 0 < split.answer_tokens < len(tokens), name
        cut = Reply(text="<think>hmm", token_ids=tokens[:2], finish_reason="length")
        assert thinking.split([1, 2], cut, Sampling()).answer is None, name
    off = Sampling(chat_template_kwargs='{"enable_thinking": false}')
    ended = tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    thinking = VllmThinking(config, tokenizer, name="qwen3")
    assert thinking.is_over(ended, off)
    assert thinking.split(ended, Reply(text="net", token_ids=(5,)), off).answer == "net"
    with pytest.raises(ValueError, match="'openai_gptoss' of vLLM does not split"):
        VllmThinking(config, tokenizer, name="openai_gptoss")
    with pytest.raises(ValueError, match="does not fit the model"):
        VllmThinking(config, AutoTokenizer.from_pretrained(DEMO_MODEL), name="deepseek_r1")


def test_marks_of_thinking_in_a_row_s_text_are_text_for_each_of_vllm_s_parsers() -> None:
    from vllm.reasoning import ReasoningParserManager

    from pipemax.answers.asks import Reply
    from pipemax.vllm_ext.engine.thinking import VllmThinking

    kinds = ("think>", "mm:think>", "seed:think>")
    marks = [f"{begin}{kind}" for kind in kinds for begin in ("<", "</")]
    config, tokenizer = for_parsers(*marks, "<|channel>", "<channel|>")

    def chat(content: str, begin: str = "") -> list[int]:
        turns = [{"role": "user", "content": content}]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(rendered + begin, add_special_tokens=False))

    tried = []
    for name in sorted(ReasoningParserManager.list_registered()):
        try:
            thinking = VllmThinking(config, tokenizer, name=name)
        except ValueError:
            continue  # of another tokenizer
        parser = ReasoningParserManager.get_reasoning_parser(name)(
            tokenizer, model_config=config.model_config, chat_template_kwargs={}
        )
        start, end = parser.reasoning_start_str, parser.reasoning_end_str
        if start is None or end is None:
            continue  # it does not look for marks in the prompt
        tried.append(name)
        plain = thinking.is_over(chat("net"), Sampling())
        for content in (f"a {end} b", f"a {start} b", end, start):
            assert thinking.is_over(chat(content), Sampling()) is plain, (name, content)
            cut = Reply(text=f"{start}hmm, so", token_ids=(5, 6, 7), finish_reason="length")
            split = thinking.split(chat(content), cut, Sampling())
            assert split == thinking.split(chat("net"), cut, Sampling()), (name, content)
        if name == "qwen3":
            assert not plain
            assert thinking.is_over(chat(f"a {start} b", f"{start}\n\n{end}\n\n"), Sampling()), name
            assert not thinking.is_over(chat(f"a {end} b", f"{start}\n"), Sampling()), name
            nothing = Reply(text=f"hmm{end}\n\n", token_ids=(5, 6, 7), finish_reason="stop")
            assert thinking.split(chat("net"), nothing, Sampling()).answer is None, name
        endings = (f"{start}hmm{end}", f"{start}hmm{end} ", f"{start}{end}\n")
        for nothing in (
            () if plain else endings
        ):  # where the prompt ends the thinking, all of it is the answer
            told = Reply(text=nothing, token_ids=(5, 6, 7), finish_reason="stop")
            assert thinking.split(chat("net"), told, Sampling()).answer is None, (name, nothing)
    assert {"qwen3", "deepseek_r1", "hy_v3", "seed_oss", "minimax_m2", "glm45", "gemma4"} <= set(tried)


def test_a_row_s_text_at_the_end_of_a_prompt_is_text_where_the_template_begins_no_turn() -> None:
    from pipemax.vllm_ext.engine.thinking import VllmThinking

    config, tokenizer = for_parsers("<think>", "</think>")
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    ended = tokenizer.encode("think </think>", add_special_tokens=False)
    assert not VllmThinking(config, tokenizer, name="deepseek_r1").is_over(ended, Sampling())
    # A prompt that no template makes is all its author's, who may have begun the model's turn.
    assert VllmThinking(config, tokenizer, name="deepseek_r1", has_turns=False).is_over(ended, Sampling())


def test_the_names_of_vllm_s_parsers_are_read_from_its_source() -> None:
    from vllm.reasoning import ReasoningParserManager

    from pipemax.serve.answer_checks import known_reasoning_parsers

    registered = set(ReasoningParserManager.list_registered())
    assert known_reasoning_parsers() <= registered
    assert {"qwen3", "deepseek_r1", "openai_gptoss"} <= known_reasoning_parsers()
