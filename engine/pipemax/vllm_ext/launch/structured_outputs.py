"""Settle how vLLM makes text follow a JSON schema: compact, by a backend that takes the schemas.

Between two tokens of JSON any white space is allowed, and small models can loop in it until ``max_tokens``. vLLM can
forbid it for a whole engine, with the backends xgrammar and guidance only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipemax.answers.patterns.plain import Reading
from pipemax.answers.patterns.schemas import places_of
from pipemax.config import EngineConfig
from pipemax.vllm_ext.seam.schema_rules import is_refused

_ARGUMENT = "structured_outputs_config"
_DECIDES = {"backend", "disable_any_whitespace"}
"""Settings of the user's with which whitespace is the user's business."""
_BACKENDS = ("xgrammar", "guidance")


def structured_outputs(config: EngineConfig) -> dict[str, Any]:
    """Return the settings of vLLM's StructuredOutputsConfig. ``ValueError`` if the config's own are no mapping."""
    settings = _settings_given(config)
    if config.is_pooling or config.json_whitespace == "any" or _DECIDES & settings.keys():
        return settings
    return {"backend": config.json_backend, "disable_any_whitespace": True, **settings}


def check_structured_outputs(config: EngineConfig) -> None:
    """Raise ``ValueError`` if vLLM refuses the config's own settings; vLLM is imported only if there are some."""
    if not (settings := _settings_given(config)):
        return
    from pipemax.vllm_ext.seam.vllm_types import StructuredOutputsConfig

    make_structured_outputs(StructuredOutputsConfig, settings)


def make_structured_outputs(kind: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """Return vLLM's object with these settings. ``ValueError`` says which of them it refuses."""
    try:
        return kind(**settings)
    except (TypeError, ValueError) as error:
        faults = [fault["msg"] for fault in error.errors()] if hasattr(error, "errors") else [str(error)]
        raise ValueError(f"vllm: {_ARGUMENT} {dict(settings)}: {'; '.join(faults)}") from error


def settings_for_schemas(
    config: EngineConfig, schemas: Sequence[str], is_enforced_by: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return the settings of an engine that enforces these JSON schemas, where they differ from the config's.

    ``is_enforced_by`` tells whether a backend's own library takes a schema. A backend that generates all texts of a
    pattern goes before one that leaves out those with quotes. Raise ``ValueError`` if the config names a backend that
    does not take a schema, or if all that takes it would misread a pattern.
    """

    def takes(backend: str, schema: str, least: Reading) -> bool:
        if is_refused(backend, json.loads(schema)) or not is_enforced_by(backend, schema):
            return False
        return backend == "guidance" or all(place.by_xgrammar >= least for place in places_of(schema))

    chosen = structured_outputs(config).get("backend", "auto")
    decided = bool(_DECIDES & _settings_given(config).keys())
    if chosen in _BACKENDS:
        backends = [chosen] if decided else sorted(_BACKENDS, key=chosen.__ne__)
        for least in (Reading.ALL, Reading.WITHOUT_ESCAPES):
            for backend in backends:
                if all(takes(backend, schema, least) for schema in schemas):
                    return {} if backend == chosen else {"json_backend": backend}
        if decided:
            raise ValueError(
                f"the backend {chosen} of {_ARGUMENT} cannot enforce the response_format: leave the backend out of "
                "the engine config"
            )
    for schema in schemas:
        # vLLM takes guidance by itself only for a schema that it refuses for xgrammar.
        if not is_refused("xgrammar", json.loads(schema)) or not takes("guidance", schema, Reading.ALL):
            _check_patterns(schema)
    return {"json_whitespace": "any"} if chosen in _BACKENDS else {}


def _check_patterns(schema: str) -> None:
    """Raise ``ValueError`` for a pattern that vLLM's other backends would misread: xgrammar, or outlines after it."""
    for place in places_of(schema):
        if place.by_xgrammar is Reading.NOTHING:
            raise ValueError(
                f"response_format has {place}, {place.fault}, and no backend that reads it takes all schemas of the "
                "job; put a pattern beside a type string and nothing else, ask in another job, or check the parsed "
                "column for it"
            )


def _settings_given(config: EngineConfig) -> dict[str, Any]:
    settings = config.vllm_arguments.get(_ARGUMENT) or {}
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except ValueError as error:
            raise ValueError(f"vllm: {_ARGUMENT} {settings!r} is not JSON: {error}") from error
    if not isinstance(settings, Mapping):
        raise ValueError(f"vllm: {_ARGUMENT} is {settings!r}; give a mapping, such as {{backend: guidance}}")
    return dict(settings)
