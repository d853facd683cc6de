"""Split outputs into thinking and answer with vLLM's own reasoning parsers, as vLLM's server does.

vLLM's core has a parser of the same name, and lets a grammar bind only what follows the thinking. The parsers look for
their marks in a whole prompt, where a row's text may hold them too. What counts is the part of the prompt that begins
the model's own turn.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.reasoning import ReasoningParser, ReasoningParserManager

from pipemax.answers.asks import Reply, Split
from pipemax.checkpoint.prompt_encoder import template_variables
from pipemax.generation import Sampling
from pipemax.vllm_ext.seam.vllm_types import VllmConfig

_LAST_TOKENS = 32
"""In which a prompt's last mark is looked for; parsers' marks take up to ten tokens."""
NO_THINKING_LIMIT = (
    "thinking_tokens is given, and the engine's reasoning_parser does not say how thinking begins and ends; set "
    "reasoning_config with reasoning_start_str and reasoning_end_str under vllm: in the engine config, or leave "
    "thinking_tokens out"
)


class VllmThinking:
    """Implements ``pipemax.answers.row.Thinking`` over the parser that vLLM's config names."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any, *, name: str, has_turns: bool = True) -> None:
        """Raise ``ValueError`` if the tokenizer lacks the parser's tokens.

        ``has_turns`` tells whether prompts are made by the chat template, if there is one.
        """
        self._kind = ReasoningParserManager.get_reasoning_parser(name)
        self._model_config = vllm_config.model_config
        self._tokenizer = tokenizer
        self._has_turns = has_turns
        # What vLLM's parsers are given; they read hardly anything of it.
        self._request: ChatCompletionRequest | ResponsesRequest = ChatCompletionRequest(
            messages=[], model="", seed=None
        )
        try:
            parser = self._parser({})
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"reasoning_parser {name!r} does not fit the model: {error}") from error
        self._request = parser.adjust_request(self._request)
        _check_that_it_splits(parser, self._request, name)
        self.skip_special_tokens = bool(self._request.skip_special_tokens)
        """Whether outputs may come without special tokens; some parsers find the thinking by them."""
        config = vllm_config.reasoning_config
        self.can_be_limited = config is not None and config.enabled
        """Whether vLLM can end the thinking after so many tokens."""
        self._begin_of_turn = lru_cache(maxsize=64)(self._rendered_begin)

    def is_over(self, prompt: Sequence[int], sampling: Sampling) -> bool:
        """See ``Thinking.is_over``."""
        variables = template_variables(sampling)
        return self._is_over(self._parser(variables), list(prompt), variables)

    def split(self, prompt: Sequence[int], reply: Reply, sampling: Sampling) -> Split:
        """See ``Thinking.split``."""
        variables = template_variables(sampling)
        parser = self._parser(variables)
        end = parser.reasoning_end_str
        if self._is_over(parser, list(prompt), variables) and (end is None or end not in reply.text):
            return Split(reasoning=None, answer=reply.text, answer_tokens=len(reply.token_ids))
        reasoning, answer = parser.extract_reasoning(reply.text, self._request)
        if not answer or not answer.strip():
            return Split(reasoning=reasoning, answer=None, answer_tokens=0)
        if not reasoning:
            return Split(reasoning=None, answer=answer, answer_tokens=len(reply.token_ids))
        content = parser.extract_content_ids(list(reply.token_ids))
        tokens = len(content) or len(reply.token_ids) - parser.count_reasoning_tokens(reply.token_ids)
        return Split(reasoning=reasoning, answer=answer, answer_tokens=tokens)

    def _is_over(self, parser: ReasoningParser, prompt: list[int], variables: dict[str, Any]) -> bool:
        return parser.is_reasoning_end(self._own_turn(parser, prompt, variables))

    def _own_turn(self, parser: ReasoningParser, prompt: list[int], variables: dict[str, Any]) -> list[int]:
        """Return the end of the prompt that begins the model's turn; nothing of it is a row's text."""
        begin = self._begin_of_turn(json.dumps(variables, sort_keys=True))
        if begin is not None and prompt[len(prompt) - len(begin) :] == begin:
            return begin
        # Whoever writes a model's turn into the prompt himself ends it with a mark.
        marks = [mark for mark in (parser.reasoning_start_str, parser.reasoning_end_str) if mark]
        last = self._tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False)
        has_mark = marks and re.search(f"(?:{'|'.join(map(re.escape, marks))})\\s*$", last)
        return prompt if has_mark else []

    def _rendered_begin(self, variables: str) -> list[int] | None:
        """Return the tokens with which the chat template begins the model's turn; None if that cannot be told."""
        try:
            turns = [{"role": "user", "content": "x"}]
            without, rendered = (
                self._tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=begins, **json.loads(variables)
                )
                for begins in (False, True)
            )
        except Exception:  # a template is a program of the model's authors, and the model may have none
            return None
        if not self._has_turns or not rendered.startswith(without):
            return None
        return list(self._tokenizer.encode(rendered[len(without) :], add_special_tokens=False))

    def _parser(self, variables: dict[str, Any]) -> ReasoningParser:
        """Make a parser, which may keep the state of one output."""
        return self._kind(self._tokenizer, model_config=self._model_config, chat_template_kwargs=variables)


def _check_that_it_splits(
    parser: ReasoningParser, request: ChatCompletionRequest | ResponsesRequest, name: str
) -> None:
    """Raise ``ValueError`` for vLLM's parsers that only find the thinking's end, such as ``openai_gptoss``."""
    try:
        has_split = isinstance(parser.extract_reasoning("x", request), tuple)
    except NotImplementedError:
        has_split = False
    if not has_split:
        raise ValueError(
            f"reasoning_parser {name!r} of vLLM does not split an output into thinking and answer; without "
            "reasoning_parser, each answer's text begins with the thinking"
        )
