"""Split outputs into thinking and answer with vLLM's own reasoning parsers, as vLLM's server does.

vLLM's core has a parser of the same name, and lets a grammar bind only what follows the thinking.
"""

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.reasoning import ReasoningParser, ReasoningParserManager

from pipemax.answers.asks import Split, Told
from pipemax.checkpoint.prompt_encoder import template_variables
from pipemax.generation import Sampling


class VllmThinking:
    """Implements ``pipemax.answers.row.Thinking`` over the parser that vLLM's config names."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Any, *, name: str) -> None:
        """Raise ``ValueError`` if the tokenizer lacks the parser's tokens."""
        self._kind = ReasoningParserManager.get_reasoning_parser(name)
        self._model_config = vllm_config.model_config
        self._tokenizer = tokenizer
        # What vLLM's parsers are given; they read hardly anything of it.
        self._request: ChatCompletionRequest | ResponsesRequest = ChatCompletionRequest(
            messages=[], model="", seed=None
        )
        try:
            parser = self._parser({})
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"reasoning_parser {name!r} does not fit the model: {error}") from error
        self._request = parser.adjust_request(self._request)
        self.skip_special_tokens = bool(self._request.skip_special_tokens)
        """Whether outputs may come without special tokens; some parsers find the thinking by them."""

    def is_over(self, prompt: Sequence[int], sampling: Sampling) -> bool:
        """See ``Thinking.is_over``."""
        return self._parser(template_variables(sampling)).is_reasoning_end(list(prompt))

    def split(self, prompt: Sequence[int], told: Told, sampling: Sampling) -> Split:
        """See ``Thinking.split``."""
        parser = self._parser(template_variables(sampling))
        end = parser.reasoning_end_str
        if parser.is_reasoning_end(list(prompt)) and (end is None or end not in told.text):
            return Split(reasoning=None, answer=told.text, answer_tokens=len(told.token_ids))
        reasoning, answer = parser.extract_reasoning(told.text, self._request)
        if not answer:
            return Split(reasoning=reasoning, answer=None, answer_tokens=0)
        if not reasoning:
            return Split(reasoning=None, answer=answer, answer_tokens=len(told.token_ids))
        content = parser.extract_content_ids(list(told.token_ids))
        tokens = len(content) or len(told.token_ids) - parser.count_reasoning_tokens(told.token_ids)
        return Split(reasoning=reasoning, answer=answer, answer_tokens=tokens)

    def _parser(self, variables: dict[str, Any]) -> ReasoningParser:
        """Make a parser, which may keep the state of one output."""
        return self._kind(self._tokenizer, model_config=self._model_config, chat_template_kwargs=variables)
