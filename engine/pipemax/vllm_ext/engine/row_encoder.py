"""Turn a row into what vLLM's core takes: token ids, and the images as the model's processor has made them.

Templates differ in how an image stands in a message, so vLLM's own renderer writes the prompt, as ``LLM.chat`` does.
What looks like a special token in the row's text stays text here too (``pipemax.checkpoint.special_tokens``): a row
must not claim an image that it does not have.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm.config import ModelConfig
from vllm.inputs import EngineInput, tokens_input
from vllm.renderers import BaseRenderer, ChatParams
from vllm.utils.mistral import is_mistral_tokenizer

from pipemax.answers.asks import Prompt
from pipemax.checkpoint.message_fields import message_fields
from pipemax.checkpoint.prompt_encoder import NO_IMAGES, PromptEncoder, template_variables
from pipemax.config import EngineConfig
from pipemax.generation import GenerationRequest, Image, RequestError
from pipemax.vllm_ext.engine.image_loading import ImageLoader, LoadedImage
from pipemax.wire import ErrorCode, guarded

_LOADING_THREADS = 8
"""A volume answers in milliseconds, and decoding does not hold Python's lock."""

_FIELDS_BY_ROLE = {"assistant": ("tool_calls", "reasoning", "reasoning_content"), "tool": ("tool_call_id",)}
"""Role → fields of a message that vLLM's renderer gives to the chat template, besides ``name``."""


def core_prompt(prompt: Prompt) -> EngineInput:
    """Return a prompt as vLLM's core takes it."""
    token_ids = list(prompt.token_ids)
    made: Any = prompt.media
    if made is None:
        return tokens_input(token_ids)
    # Tokens may have followed the prompt whose images were made.
    with_media: Any = {**made, "prompt_token_ids": token_ids}
    whole: EngineInput = with_media
    return whole


class RowEncoder:
    """Encodes rows, with images and without. Thread-safe."""

    def __init__(
        self,
        renderer: BaseRenderer[Any],
        model_config: ModelConfig,
        prompts: PromptEncoder,
        config: EngineConfig,
    ) -> None:
        self._renderer = renderer
        self._prompts = prompts
        self._loader = ImageLoader(config.images)
        multimodal = model_config.multimodal_config
        self._takes_images = (
            multimodal is not None
            and not multimodal.language_model_only
            and renderer.mm_processor is not None
            and "image" in renderer.mm_processor.info.supported_mm_limits
        )
        # Mistral's own tokenizer writes token ids, and never takes a row's text for a control token.
        self._writes_tokens = is_mistral_tokenizer(renderer.tokenizer)
        self._pool = ThreadPoolExecutor(_LOADING_THREADS, thread_name_prefix="load-images")
        # A processor of a model's authors need not be safe for threads.
        self._lock = threading.Lock()

    def encode(self, requests: Sequence[GenerationRequest]) -> list[Prompt | RequestError]:
        """Return the prompt of each request, or why it has none."""
        with_images = [request for request in requests if request.images]
        texts = iter(self._prompts.encode([request for request in requests if not request.images]))
        images = iter(self._encode_images(with_images) if with_images else [])
        encoded: list[Prompt | RequestError] = []
        for request in requests:
            one = next(images) if request.images else next(texts)
            encoded.append(Prompt(one) if isinstance(one, list) else one)
        return encoded

    def _encode_images(self, requests: Sequence[GenerationRequest]) -> list[Prompt | RequestError]:
        if not self._takes_images:
            refusal = RequestError(code=ErrorCode.INVALID_IMAGE, message=NO_IMAGES)
            return [refusal for _ in requests]
        loaded = self._pool.map(self._loader.load, [request.images for request in requests])
        return [
            images
            if isinstance(images, RequestError)
            else guarded(partial(self._encode_one, images=images), request, ErrorCode.INVALID_PROMPT)
            for request, images in zip(requests, loaded, strict=True)
        ]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _encode_one(self, request: GenerationRequest, images: list[LoadedImage]) -> Prompt | RequestError:
        # The template is vLLM's business: it may be the processor's, where the tokenizer has none.
        fault = self._prompts.fault_of_messages(request) or _fault_of_fields(request)
        if fault is not None:
            return fault
        marked, mark = (request, None) if self._writes_tokens else self._prompts.marked(request)
        variables = template_variables(request.sampling)
        settings = {"add_generation_prompt": True, "tokenize": self._writes_tokens, **variables}
        try:
            with self._lock:
                _, rendered = self._renderer.render_messages(
                    _conversation(marked, images), ChatParams(chat_template_kwargs=settings)
                )
        except Exception as error:  # a template is a program of the model's authors: it may raise anything
            return RequestError(
                code=ErrorCode.INVALID_PROMPT,
                message=f"the model's chat template refused the messages: {error}",
            )
        return self._processed(dict(rendered), mark)

    def _processed(self, rendered: dict[str, Any], mark: str | None) -> Prompt | RequestError:
        """Return the prompt with the images in their places. The template has written the special tokens."""
        if "prompt" in rendered:
            token_ids = self._prompts.tokenized(rendered.pop("prompt"), mark)
            if isinstance(token_ids, RequestError):
                return token_ids
            rendered["prompt_token_ids"] = token_ids
        inputs: Any = rendered
        try:
            with self._lock:
                # Without the cache of the processor's results: the core's copy of it wants all requests in one order.
                made: Any = self._renderer.process_for_engine(inputs, time.time(), skip_mm_cache=True)
        except Exception as error:  # a processor, too
            return RequestError(
                code=ErrorCode.INVALID_IMAGE, message=f"the model's processor refused the images: {error}"
            )
        prompt = Prompt(token_ids=made["prompt_token_ids"], media=made)
        return self._prompts.fault_of_length(prompt.token_ids) or prompt


def _conversation(request: GenerationRequest, images: Sequence[LoadedImage]) -> Any:
    """Return the messages as vLLM takes them."""
    waiting = iter(images)
    turns: list[dict[str, Any]] = []
    if request.system is not None:
        turns.append({"role": "system", "content": request.system})
    for message in request.messages or ():
        content: Any = message.content
        if not isinstance(content, str):
            content = [
                {"type": "image_pil", "image_pil": next(waiting)}
                if isinstance(part, Image)
                else {"type": "text", "text": part}
                for part in content
            ]
        turns.append({"role": message.role, "content": content, **message_fields(message)})
    return turns


def _fault_of_fields(request: GenerationRequest) -> RequestError | None:
    """Return the error of a field that vLLM's renderer drops without a word, if a message has one."""
    for message in request.messages or ():
        kept = {"name", *_FIELDS_BY_ROLE.get(message.role, ())}
        for name, value in message_fields(message).items():
            if name not in kept or (name == "name" and not isinstance(value, str)):
                return RequestError(
                    code=ErrorCode.INVALID_PROMPT,
                    message=f"the field {name!r} of a message with the role {message.role} cannot be passed on in a "
                    "row with images",
                )
    return None
