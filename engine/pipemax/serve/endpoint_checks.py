"""Check an endpoint and a generation spec before a job: what is served, and whether it can give such answers."""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipemax.checkpoint.fingerprint import served_model
from pipemax.checkpoint.model_tasks import check_tasks
from pipemax.endpoint_config import EndpointConfig
from pipemax.generation import RequestError, Sampling
from pipemax.serve.rows.arrow_rows import sampled_requests, without_images
from pipemax.serve.schema_checks import check_schema
from pipemax.wire import PACKAGE_VERSION, GenerationSpec, PreflightReply, PreflightRequest

_T = TypeVar("_T")
_U = TypeVar("_U")


def endpoint_reply(request: PreflightRequest) -> PreflightReply:
    """Return what a job must know of its endpoint. ``ValueError`` says what is wrong, and how to mend it."""
    try:
        config = EndpointConfig.parse(request.engine).with_keys(os.environ)
    except ValueError as error:
        raise ValueError(f"engine config: {error}") from error
    asked = of_each(request, _checked_sampling, (request.generation, *request.questions))
    of_each(request, lambda settings: check_tasks(config, (settings,)), asked)
    # aiohttp is in the environment of endpoints only.
    from pipemax.endpoints.probe import probe
    from pipemax.endpoints.token_counts import count_prompts

    probed = probe(config, asked[1:] or asked, has_images=request.has_images)
    config = config.model_copy(update={"server": probed.server})
    sampled = [
        one if isinstance(one, RequestError) else without_images(one)
        for one in sampled_requests(request, asked)
    ]
    counted = count_prompts(config, probed.server, sampled)
    return PreflightReply(
        model=config.model,
        model_fingerprint=served_model(config),
        max_model_len=max((model.get("max_model_len") or 0 for model in probed.server.models), default=0),
        prompt_tokens=counted.tokens,
        token_note=counted.note,
        shared_prefix_tokens=counted.shared_prefix,
        output_tokens=[
            0
            if isinstance(one, RequestError) or not tokens or config.is_pooling
            else one.sampling.max_tokens * one.sampling.n * one.sampling.attempts
            for one, tokens in zip(sampled, counted.tokens, strict=True)
        ],
        first_prompt=counted.first_prompt,
        engine=config.model_dump(mode="json"),
        engine_settings={"server": probed.server.model_dump(mode="json")},
        expected_rows=config.max_num_seqs,
        versions={
            "pipemax-spark": PACKAGE_VERSION,
            **({} if probed.version is None else {"vllm": probed.version}),
        },
    )


def _checked_sampling(generation: GenerationSpec) -> Sampling:
    if generation.response_format is not None:
        check_schema(generation.response_format)
    return generation.sampling()


def of_each(request: PreflightRequest, check: Callable[[_T], _U], settings: Sequence[_T]) -> list[_U]:
    """Return what a check makes of the job's settings and of each question's; an error names the question."""
    checked = []
    for name, settings_of_question in zip((None, *request.question_names), settings, strict=True):
        try:
            checked.append(check(settings_of_question))
        except ValueError as error:
            raise ValueError(f"ask: question {name!r}: {error}" if name else str(error)) from error
    return checked
