"""An engine with a pooling model under stock vLLM: it embeds, classifies or scores rows instead of generating text.

Prompts are made by vLLM's own renderer and, for cross-encoders, its own processor of pairs, so that a row's result is
that of vLLM's ``LLM.embed``, ``LLM.classify`` and ``LLM.score``.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm import PoolingParams
from vllm.config import VllmConfig
from vllm.entrypoints.pooling.scoring.io_processor import CrossEncoderIOProcessor
from vllm.entrypoints.pooling.typing import ScoringRenderParams
from vllm.exceptions import VLLMValidationError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.renderers.chat_utils import ChatTemplateConfig
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import TokenizeParams
from vllm.tasks import SCORE_TYPE_MAP, PoolingTask
from vllm.v1.engine.llm_engine import LLMEngine

from pipemax.answers.asks import Ask, Prompt, Reply
from pipemax.answers.pooled import PooledRow
from pipemax.checkpoint.pooling_texts import row_texts
from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.generation import Completion, GenerationRequest, RequestError, Sampling
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.vllm_ext.engine.vllm_engine import VllmEngine
from pipemax.wire import ErrorCode, guarded

_TOO_LONG = ("input_text", "input_tokens")
"""What vLLM's renderer names when it finds a prompt too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingAsk(Ask):
    """One prompt of a pooling task."""

    params: PoolingParams


class PoolingEngine(VllmEngine):
    """Implements ``pipemax.api.Engine`` for a pooling task."""

    def _measure(self, config: EngineConfig) -> MeasuredEngine | None:
        return None

    def _prepare(self, config: EngineConfig) -> None:
        self._prompts = PoolingPrompts(self._engine, self._vllm.vllm_config, config)
        labels = getattr(self._vllm.vllm_config.model_config.hf_config, "id2label", None)
        self._labels: dict[int, str] = labels or {}

    def _open(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ask] | Completion]:
        for request in requests:
            asks = guarded(self._asks, request, ErrorCode.INVALID_PROMPT)
            if isinstance(asks, RequestError):
                yield Completion(request_id=request.request_id, error=asks)
                continue
            row = PooledRow(request.request_id, [*asks], self._task, self._labels)
            yield self._rows.open(request.request_id, row)

    def _asks(self, request: GenerationRequest) -> list[PoolingAsk] | RequestError:
        return self._fault_of(request) or self._prompts.asks(request)

    def _sampling_params(self, ask: Ask) -> PoolingParams:
        assert isinstance(ask, PoolingAsk), ask
        return ask.params

    def _outcome(self, output: RequestOutput | PoolingRequestOutput) -> Reply:
        assert isinstance(output, PoolingRequestOutput), output
        if output.error is not None:
            reason = f"the engine failed the row: {output.error}"
            return Reply(error=RequestError(code=ErrorCode.ENGINE_ERROR, message=reason))
        return Reply(pooled=output.outputs.data.float().reshape(-1).numpy())


class PoolingPrompts:
    """Turns rows into prompts of the loaded model. Thread-safe."""

    def __init__(self, engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig) -> None:
        """Raise ``EngineStartError`` if the model cannot do the task."""
        self._renderer = engine.renderer
        self._model_config = vllm_config.model_config
        self._max_model_len: int = self._model_config.max_model_len
        self._task: PoolingTask = pooling_task(engine, vllm_config, config)
        self._pairs: Any = None
        if config.task == "score" and self._task == "classify":
            make: Any = CrossEncoderIOProcessor  # vLLM gives its constructor no types
            self._pairs = make(vllm_config, engine.renderer, ChatTemplateConfig())
        # A fast tokenizer's Rust object refuses a second caller while its options are being set.
        self._lock = threading.Lock()

    def asks(self, request: GenerationRequest) -> list[PoolingAsk] | RequestError:
        """Return a row's prompts, or why it has none."""
        texts = row_texts(request)
        if isinstance(texts, RequestError):
            return texts
        sampling = request.sampling
        params = PoolingParams(
            task=self._task, dimensions=sampling.dimensions, use_activation=sampling.normalize
        )
        try:
            with self._lock:
                if self._pairs is not None:
                    prompts = [self._pair(texts, params, sampling)]
                else:
                    prompts = [(self._tokens(text, sampling), params) for text in texts]
        except VLLMValidationError as error:
            if error.parameter in _TOO_LONG:
                return self._too_long(error)
            return RequestError(code=ErrorCode.INVALID_PROMPT, message=f"vLLM refused the prompt: {error}")
        except (TypeError, UnicodeError, ValueError) as error:
            return RequestError(
                code=ErrorCode.INVALID_PROMPT, message=f"the prompt cannot be tokenized: {error}"
            )
        if not all(token_ids for token_ids, _ in prompts):
            return RequestError(code=ErrorCode.EMPTY_PROMPT, message="the prompt has no tokens")
        names = (
            [request.request_id] if len(prompts) == 1 else [f"{request.request_id} {n}" for n in ("q", "d")]
        )
        return [
            PoolingAsk(ask_id=name, prompt=Prompt(token_ids), sampling=sampling, params=of_prompt)
            for name, (token_ids, of_prompt) in zip(names, prompts, strict=True)
        ]

    def _tokens(self, text: str, sampling: Sampling) -> list[int]:
        prompt = parse_model_prompt(self._model_config, text)
        rendered: Any
        (rendered,) = self._renderer.render_cmpl([prompt], self._tokenize_params(sampling))
        return list(rendered["prompt_token_ids"])

    def _pair(
        self, texts: Sequence[str], params: PoolingParams, sampling: Sampling
    ) -> tuple[list[int], PoolingParams]:
        query, document = texts
        rendered = self._pairs.render(
            ScoringRenderParams(
                data_1=query,
                data_2=document,
                chat_template=None,
                max_tokens_per_query=0,
                max_tokens_per_doc=0,
                tok_params=self._tokenize_params(sampling),
                prompt_extras=None,
                skip_mm_cache=False,
                params=params,
                lora_requests=None,
                priorities=0,
            )
        )
        return list(rendered["prompts"]["prompt_token_ids"]), rendered["params"]

    def _tokenize_params(self, sampling: Sampling) -> TokenizeParams:
        params: TokenizeParams = self._renderer.default_cmpl_tok_params
        return replace(params, truncate_prompt_tokens=-1) if sampling.truncate else params

    def _too_long(self, error: VLLMValidationError) -> RequestError:
        of_pair = "query and document have together" if self._pairs is not None else "the prompt has"
        return RequestError(
            code=ErrorCode.PROMPT_TOO_LONG,
            message=(
                f"{of_pair} more than max_model_len {self._max_model_len} tokens. Shorten the text, have it cut "
                "(truncate), or raise max_model_len"
            ),
        )


def pooling_task(engine: LLMEngine, vllm_config: VllmConfig, config: EngineConfig) -> PoolingTask:
    """Return vLLM's name of what the loaded model does for the task. ``EngineStartError`` if it cannot do it."""
    model = vllm_config.model_config
    supported = engine.get_supported_tasks()
    pooling: PoolingTask | None = model.get_pooling_task(supported)
    task: PoolingTask = "embed" if config.task == "embed" else "classify"
    if config.task != "score":
        if task in supported:
            return task
    elif pooling is not None and (kind := SCORE_TYPE_MAP.get(pooling)) in ("bi-encoder", "cross-encoder"):
        num_labels = getattr(model.hf_config, "num_labels", 0)
        if kind == "cross-encoder" and num_labels != 1:
            raise EngineStartError(
                f"model {config.model!r} has {num_labels} labels, and a cross-encoder that scores has one; use the "
                "task classify"
            )
        return pooling
    raise EngineStartError(
        f"model {config.model!r} cannot do the task {config.task}; vLLM runs it for {', '.join(sorted(supported))}. "
        f"Name another model, or have vLLM convert this one (vllm: {{convert: {task}}})"
    )
