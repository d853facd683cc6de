"""Check an endpoint and a generation spec before a job: what is served, and whether it can give such answers."""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipemax.checkpoint.fingerprint import served_model
from pipemax.checkpoint.model_tasks import check_tasks
from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoints.requests import unknown_setting
from pipemax.generation import Sampling
from pipemax.wire import PreflightReply, PreflightRequest

_T = TypeVar("_T")
_U = TypeVar("_U")


def endpoint_reply(request: PreflightRequest) -> PreflightReply:
    """Return what a job must know of its endpoint. ``ValueError`` says what is wrong, and how to mend it."""
    try:
        config = EndpointConfig.parse(request.engine).with_keys(os.environ)
    except ValueError as error:
        raise ValueError(f"engine config: {error}") from error
    asked = of_each(
        request, lambda generation: generation.sampling(), (request.generation, *request.questions)
    )
    of_each(request, lambda settings: check_tasks(config, (settings,)), asked)
    from pipemax.endpoints.probe import probe  # aiohttp is in the environment of endpoints only

    server = probe(config, asked)
    config = config.model_copy(update={"server": server})

    def check(settings: Sampling) -> None:
        if (fault := unknown_setting(settings, config, server)) is not None:
            raise ValueError(fault)

    of_each(request, check, asked)
    settings = {"server": server.model_dump(mode="json")}
    return PreflightReply(
        model=config.model,
        model_fingerprint=served_model(config),
        max_model_len=max((model.get("max_model_len") or 0 for model in server.models), default=0),
        engine=config.model_dump(mode="json"),
        engine_settings=settings,
        expected_rows=config.max_num_seqs,
    )


def of_each(request: PreflightRequest, check: Callable[[_T], _U], settings: Sequence[_T]) -> list[_U]:
    """Return what a check makes of the job's settings and of each question's; an error names the question."""
    checked = []
    for name, settings_of_question in zip((None, *request.question_names), settings, strict=True):
        try:
            checked.append(check(settings_of_question))
        except ValueError as error:
            raise ValueError(f"ask: question {name!r}: {error}" if name else str(error)) from error
    return checked
