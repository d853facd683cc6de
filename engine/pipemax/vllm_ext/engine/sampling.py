"""Turn an ask into vLLM's parameters, and vLLM's output of it into what was told."""

from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

from pipemax.answers.asks import Ask, Reply
from pipemax.answers.patterns.plain import plain_regex
from pipemax.answers.patterns.schemas import for_guidance, for_xgrammar
from pipemax.generation import RequestError, Sampling
from pipemax.sampling import MOST_REPEATED_TOKENS
from pipemax.wire import ErrorCode

_FINISH_REASONS = ("stop", "length", "repetition", "abort")


def sampling_params(
    ask: Ask, *, skip_special_tokens: bool = True, is_guidance: bool = False
) -> SamplingParams:
    """Return vLLM's parameters. ``ValueError`` if vLLM finds them invalid.

    ``is_guidance`` tells whether the engine's grammars are guidance's, which reads more patterns than the others.
    """
    sampling = ask.sampling
    common: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": ask.seed,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    if ask.allowed:
        allowed = list(ask.allowed)
        return SamplingParams(
            max_tokens=1,
            allowed_token_ids=allowed,
            logprob_token_ids=allowed if ask.with_scores else None,
            flat_logprobs=True,
            detokenize=False,
            **common,
        )
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        bad_words=list(sampling.bad_words),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        thinking_token_budget=sampling.thinking_tokens,
        repetition_detection=_repetition_detection(sampling),
        structured_outputs=_structured_outputs(sampling, is_guidance=is_guidance),
        logprobs=0 if sampling.logprobs and not sampling.choice else None,
        flat_logprobs=True,
        skip_special_tokens=skip_special_tokens,
        **common,
    )


def _repetition_detection(sampling: Sampling) -> RepetitionDetectionParams | None:
    if sampling.stop_repetition == 0:
        return None
    return RepetitionDetectionParams(
        max_pattern_size=MOST_REPEATED_TOKENS, min_pattern_size=1, min_count=sampling.stop_repetition
    )


def _structured_outputs(sampling: Sampling, *, is_guidance: bool) -> StructuredOutputsParams | None:
    if not sampling.is_constrained:
        return None
    schema, regex = sampling.response_format, sampling.regex
    if schema is not None:
        schema = for_guidance(schema) if is_guidance else for_xgrammar(schema)
    return StructuredOutputsParams(
        json=schema,
        regex=None if regex is None else plain_regex(regex),
        choice=list(sampling.choice) or None,
        grammar=sampling.grammar,
    )


def told_of(sequence: CompletionOutput) -> Reply:
    """Return what vLLM told of an ask that has ended."""
    if sequence.finish_reason not in _FINISH_REASONS:
        reason = f"the engine ended the row with {sequence.finish_reason!r}"
        return Reply(error=RequestError(code=ErrorCode.ENGINE_ERROR, message=reason))
    logprobs = sequence.logprobs
    assert logprobs is None or isinstance(logprobs, FlatLogprobs), type(logprobs)
    return Reply(
        text=sequence.text,
        token_ids=tuple(sequence.token_ids),
        finish_reason=sequence.finish_reason,
        # A token's own logprob comes first at its position.
        logprobs=None if logprobs is None else [logprobs.logprobs[first] for first in logprobs.start_indices],
        pieces=None
        if logprobs is None
        else [logprobs.decoded_tokens[first] or "" for first in logprobs.start_indices],
        scores=None if logprobs is None else _last_scores(logprobs),
    )


def _last_scores(logprobs: FlatLogprobs) -> Mapping[int, float]:
    if not logprobs.start_indices:
        return {}
    first, end = logprobs.start_indices[-1], logprobs.end_indices[-1]
    return dict(zip(logprobs.token_ids[first:end], logprobs.logprobs[first:end], strict=True))
