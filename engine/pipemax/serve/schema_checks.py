"""Check, before any engine starts, that a schema, regular expression or grammar can be enforced during generation.

A JSON schema must also be one that can be satisfied. Two grammar compilers that come with vLLM check it: xgrammar,
which vLLM normally uses, and llguidance, its substitute. Only llguidance finds contradictions across a schema and names
the keywords that it does not know; xgrammar ignores the keywords that it does not know. This module does not know how
many tokens the shortest output takes.
"""

import json
import re
from collections.abc import Sequence

from pipemax.answers.patterns.plain import plain_regex
from pipemax.answers.patterns.schemas import for_guidance, for_python, for_xgrammar, places_of
from pipemax.answers.references import check_references
from pipemax.config import EngineConfig
from pipemax.generation import Sampling
from pipemax.vllm_ext.launch.structured_outputs import settings_for_schemas

_XGRAMMAR_ALONE_KNOWS = {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}
_PLACE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


def check_response_format(text: str) -> None:
    """Raise ``ValueError`` for a schema that is invalid, not enforceable by the engine, or impossible to satisfy."""
    import llguidance  # imported only for a schema: an engine may run without these two
    import xgrammar

    check_schema(text)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(for_guidance(text))
    _check_verdict(llguidance.LLMatcher.validate_grammar(grammar))
    try:
        xgrammar.Grammar.from_json_schema(for_xgrammar(text))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"response_format cannot be enforced while generating: {_reason(error)}") from error


def check_schema(text: str) -> None:
    """Raise ``ValueError`` for a schema that is invalid."""
    import jsonschema  # imported only for a schema

    try:
        places_of(text)
        schema = json.loads(for_python(text))
        jsonschema.validators.validator_for(schema).check_schema(schema)
        check_references(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"response_format is not JSON: {error}") from error
    except jsonschema.SchemaError as error:
        where = "/".join(str(part) for part in error.absolute_path) or "its root"
        raise ValueError(f"response_format is no valid JSON schema: at {where}: {error.message}") from error


def check_constraint(sampling: Sampling) -> None:
    """Raise ``ValueError`` if the regular expression or grammar cannot be enforced while generating."""
    if sampling.regex is None and sampling.grammar is None:
        return
    import xgrammar  # imported only for these: an engine may run without it

    try:
        if sampling.regex is not None:
            xgrammar.Grammar.from_regex(_plain(sampling.regex))
        elif "::=" in (grammar := sampling.grammar or ""):
            xgrammar.Grammar.from_ebnf(grammar)
        else:
            xgrammar.Grammar.from_lark(grammar)
    except (RuntimeError, ValueError) as error:
        name = "grammar" if sampling.regex is None else "regex"
        reason = _reason(error).splitlines()[0]
        raise ValueError(f"{name} cannot be enforced while generating: {reason}") from error


def _plain(regex: str) -> str:
    try:
        return plain_regex(regex)
    except ValueError as error:
        raise ValueError(f"{regex!r} has {error}; write it without") from error


def _reason(error: Exception) -> str:
    """Return what xgrammar says, without the place in its sources."""
    return _PLACE_IN_XGRAMMAR.sub("", str(error).strip())


def settings_for(config: EngineConfig, asked: Sequence[Sampling]) -> dict[str, str]:
    """Return the engine settings with which vLLM enforces the schemas of these samplings.

    Raise ``ValueError`` if the config itself names a backend that does not.
    """
    schemas = [settings.response_format for settings in asked if settings.response_format is not None]
    return settings_for_schemas(config, schemas, _is_enforced_by)


def _is_enforced_by(backend: str, schema: str) -> bool:
    """Tell whether llguidance enforces the schema; for xgrammar, ``check_response_format`` has found it out."""
    if backend != "guidance":
        return True
    import llguidance

    grammar = llguidance.LLMatcher.grammar_from_json_schema(for_guidance(schema))
    return not llguidance.LLMatcher.validate_grammar(grammar)


def _check_verdict(verdict: str) -> None:
    """Raise ``ValueError`` if llguidance's verdict is not empty.

    Other complaints are ignored: xgrammar may be able to enforce what llguidance cannot.
    """
    kind, _, reason = verdict.partition(": ")
    match kind:
        case "Unsatisfiable schema":
            raise ValueError(f"response_format can be met by no output: {reason}; mend the schema")
        case "Unimplemented keys":
            keywords = sorted(set(json.loads(reason)) - _XGRAMMAR_ALONE_KNOWS)
            if keywords:
                raise ValueError(
                    f"response_format has keywords that cannot be enforced while generating: {', '.join(keywords)}; "
                    "leave them out and check the parsed column for them"
                )
        case "Unknown format":
            raise ValueError(
                f"response_format has the format {reason!r}, which cannot be enforced while generating; leave it out"
            )
