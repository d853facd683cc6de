"""Turns a row into the token ids that the model sees: system message, chat template, tokenizer, length check.

The engine and the preflight share this, so that ``--dry-run`` counts what is run. In a chat, the special tokens are
those of the template and of the system message; in a plain prompt, those of the row. It works with any tokenizer of
``transformers``' interface, and imports neither it nor vLLM.
"""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from pipemax.checkpoint.message_fields import fault_of_fields, message_fields, texts_in, with_texts
from pipemax.checkpoint.special_tokens import SpecialTokens, Tokenizer
from pipemax.config import ChatMode
from pipemax.generation import GenerationRequest, Image, Message, RequestError, Sampling
from pipemax.wire import ErrorCode, guarded, joined_parts

_ROLE = re.compile(r"[\w-]+")
NO_IMAGES = (
    "the row has an image, and this engine takes none: that needs a model with image input and policy: vllm"
)


def shared_prefix_tokens(prompts: Sequence[list[int]]) -> int:
    """Count the leading tokens that all prompts have in common; 0 for fewer than two prompts."""
    if len(prompts) < 2:
        return 0
    # All prompts share what the first and the last in order share.
    first, last = min(prompts), max(prompts)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return sum(1 for _ in same)


def template_variables(sampling: Sampling) -> dict[str, Any]:
    """Return the variables that the chat template gets besides the messages."""
    variables = _parsed(sampling.chat_template_kwargs) if sampling.chat_template_kwargs else {}
    effort = sampling.reasoning_effort
    return dict(variables) if effort is None else {**variables, "reasoning_effort": effort}


@lru_cache(maxsize=64)
def _parsed(text: str) -> dict[str, Any]:
    variables: dict[str, Any] = json.loads(text)
    return variables


class PromptEncoder:
    """Renders and tokenizes requests. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, chat: ChatMode, max_model_len: int) -> None:
        """Raise ``ValueError`` if ``chat`` asks for a template that the tokenizer does not have."""
        self.has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        if chat is ChatMode.ALWAYS and not self.has_chat_template:
            raise ValueError(
                "chat is 'always', but the model's tokenizer has no chat template; use auto or never"
            )
        self._tokenizer = tokenizer
        self._special_tokens = SpecialTokens(tokenizer)
        self._wraps_prompts = chat is ChatMode.ALWAYS or (chat is ChatMode.AUTO and self.has_chat_template)
        self._max_model_len = max_model_len
        # A fast tokenizer's Rust object refuses a second caller while its options are being set.
        self._lock = threading.Lock()

    def encode(self, requests: Sequence[GenerationRequest]) -> list[list[int] | RequestError]:
        """Return the token ids of each request, or why it has none."""
        return [guarded(self._encode, request, ErrorCode.INVALID_PROMPT) for request in requests]

    def _encode(self, request: GenerationRequest) -> list[int] | RequestError:
        if (fault := self._fault_of(request)) is not None:
            return fault
        mark = None
        if self._is_chat(request):
            request, mark = self.marked(request)
        text = self._rendered(request)
        if isinstance(text, RequestError):
            return text
        # A rendered chat holds its own special tokens; a plain prompt gets the tokenizer's (such as <s>).
        token_ids = self.tokenized(text, mark, add_special_tokens=not self._is_chat(request))
        if isinstance(token_ids, RequestError):
            return token_ids
        return self.fault_of_length(token_ids) or token_ids

    def render(self, request: GenerationRequest) -> str | RequestError:
        """Return the text that is tokenized, or why there is none."""
        rendered: str | RequestError = guarded(
            lambda one: self._fault_of(one) or self._rendered(one), request, ErrorCode.INVALID_PROMPT
        )
        return rendered

    def _fault_of(self, request: GenerationRequest) -> RequestError | None:
        if request.prompt is not None and request.messages is not None:
            return RequestError(code=ErrorCode.INVALID_PROMPT, message="both a prompt and messages are given")
        if request.messages is None and (request.prompt is None or not request.prompt.strip()):
            what = "null" if request.prompt is None else "empty or blank"
            return RequestError(code=ErrorCode.EMPTY_PROMPT, message=f"the prompt is {what}")
        if request.messages is not None and not request.messages:
            return RequestError(code=ErrorCode.EMPTY_PROMPT, message="the list of messages is empty")
        if request.images:
            return RequestError(code=ErrorCode.INVALID_IMAGE, message=NO_IMAGES)
        if not self._is_chat(request):
            return None
        if not self.has_chat_template:
            return RequestError(
                code=ErrorCode.INVALID_PROMPT,
                message="messages and system prompts need a chat template, which this model's tokenizer lacks",
            )
        return self.fault_of_messages(request)

    def _is_chat(self, request: GenerationRequest) -> bool:
        return request.messages is not None or request.system is not None or self._wraps_prompts

    def marked(self, request: GenerationRequest) -> tuple[GenerationRequest, str | None]:
        """Return the request with marks for the special tokens in its row's text, and what the marks begin with."""
        if request.messages is not None:
            fields = [message_fields(message) for message in request.messages]
            texts = [text for message in request.messages for text in message.texts]
            marked, mark = self._special_tokens.mark([*texts, *texts_in(fields)])
            if mark is None:
                return request, None
            new = iter(marked)
            contents = [_with_texts(message.content, new) for message in request.messages]
            new_fields = with_texts(fields, lambda _: next(new))
            messages = tuple(
                Message(role=turn.role, content=content, fields=json.dumps(of_turn) if of_turn else None)
                for turn, content, of_turn in zip(request.messages, contents, new_fields, strict=True)
            )
            return replace(request, messages=messages), mark
        marked, mark = self._special_tokens.mark([request.prompt or ""])
        return (replace(request, prompt=marked[0]) if mark else request), mark

    def fault_of_messages(self, request: GenerationRequest) -> RequestError | None:
        """Return the error of a role that is no word, or of a field that the template cannot be given, if any."""
        for message in request.messages or ():
            if not _ROLE.fullmatch(message.role):  # templates put the role between special tokens as it is
                return RequestError(
                    code=ErrorCode.INVALID_PROMPT,
                    message=f"the role of a message is {message.role[:80]!r}; roles are words, such as user",
                )
        fault = fault_of_fields(request.messages or (), getattr(self._tokenizer, "chat_template", None))
        return None if fault is None else RequestError(code=ErrorCode.INVALID_PROMPT, message=fault)

    def _rendered(self, request: GenerationRequest) -> str | RequestError:
        if not self._is_chat(request):
            assert request.prompt is not None
            return request.prompt
        turns: list[dict[str, Any]] = (
            [] if request.system is None else [{"role": "system", "content": request.system}]
        )
        if request.messages is None:
            turns.append({"role": "user", "content": request.prompt or ""})
        else:
            turns += [
                {"role": message.role, "content": joined_parts(message.texts), **message_fields(message)}
                for message in request.messages
            ]
        try:
            with self._lock:
                text: str = self._tokenizer.apply_chat_template(
                    turns,
                    tokenize=False,
                    add_generation_prompt=True,
                    **template_variables(request.sampling),
                )
                return text
        except Exception as error:  # a template is a program of the model's authors: it may raise anything
            return RequestError(
                code=ErrorCode.INVALID_PROMPT,
                message=f"the model's chat template refused the messages: {error}",
            )

    def tokenized(
        self, text: str, mark: str | None, *, add_special_tokens: bool = False
    ) -> list[int] | RequestError:
        """Return the token ids of a rendered text, which has marks if ``mark`` is given, or why it has none."""
        try:
            with self._lock:
                if mark is not None:
                    token_ids = self._special_tokens.tokenize(text, mark, self._tokenizer.encode)
                else:
                    token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError, ValueError) as error:
            return RequestError(
                code=ErrorCode.INVALID_PROMPT, message=f"the prompt cannot be tokenized: {error}"
            )
        if not token_ids:
            return RequestError(code=ErrorCode.EMPTY_PROMPT, message="the prompt has no tokens")
        return list(token_ids)

    def fault_of_length(self, token_ids: Sequence[int]) -> RequestError | None:
        """Return the error of a prompt that leaves no room for an output, if this is one."""
        if len(token_ids) < self._max_model_len:
            return None
        return RequestError(
            code=ErrorCode.PROMPT_TOO_LONG,
            message=(
                f"the prompt has {len(token_ids)} tokens; max_model_len is {self._max_model_len}, of which one "
                "must be left for the output. Shorten the prompt or raise max_model_len"
            ),
        )


def _with_texts(content: str | tuple[str | Image, ...], new: Iterator[str]) -> str | tuple[str | Image, ...]:
    """Return a message's content with the next new texts in place of its own."""
    if isinstance(content, str):
        return next(new)
    return tuple(next(new) if isinstance(part, str) else part for part in content)
