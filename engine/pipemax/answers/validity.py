"""Judge a finished answer: does it match what the job asked for?

The engine constrains its output while it generates, so an answer is invalid mostly because it was cut. A JSON answer is
checked with ``jsonschema``, which also finds what the grammar compilers do not enforce; its patterns are ECMA-262's.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from pipemax.answers.patterns.plain import plain_pattern
from pipemax.answers.patterns.schemas import for_python, places_of
from pipemax.answers.references import validator_of
from pipemax.generation import RequestError, Sampling
from pipemax.wire import ErrorCode, encodable, guarded

CUT: Mapping[str | None, str] = {
    "length": "was cut at max_tokens before it was complete",
    "repetition": "was ended before it was complete, because it repeated itself",
}
"""Reason why an output ended early → what is wrong with it."""
_SHOWN = 200


def fault_of(text: str, finish_reason: str | None, sampling: Sampling) -> str | None:
    """Return what is wrong with the answer, as the rest of a sentence about it; None if nothing is."""
    cut = CUT.get(finish_reason)
    if sampling.choice:
        return _fault_of_choice(text, sampling.choice, cut)
    if sampling.response_format is not None:
        return _fault_of_json(text, sampling.response_format, cut)
    return cut if sampling.is_constrained else None


def vote_of(text: str, sampling: Sampling) -> str:
    """Return a text that is equal for answers that count as equal, such as JSON with other white space."""
    if sampling.response_format is None:
        return text.strip()
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except RecursionError:
        return text.strip()


def _fault_of_choice(text: str, choices: tuple[str, ...], cut: str | None) -> str | None:
    if text not in choices:
        return cut or f"{text[:_SHOWN]!r} is none of the choices"
    may_go_on = any(choice != text and choice.startswith(text) for choice in choices)
    return cut if may_go_on else None


def _fault_of_json(text: str, schema: str, cut: str | None) -> str | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return cut or f"is not JSON: {error}"
    fault = guarded(_first_fault(schema), value, ErrorCode.RESPONSE_FORMAT)
    if fault is None:
        return None
    if isinstance(fault, RequestError):  # 1e999 under multipleOf, for instance, or arrays nested hundredfold
        return f"cannot be checked against the schema: {fault.message[:_SHOWN]}"
    return f"does not match the schema: {encodable(fault[:_SHOWN])}"


@lru_cache(maxsize=64)
def _first_fault(schema: str) -> Callable[[Any], str | None]:
    import jsonschema  # imported only for a schema: an engine may run without it

    validator = validator_of(json.loads(for_python(schema)))
    patterns = {
        repr(plain_pattern(place.pattern).searched): repr(place.pattern) for place in places_of(schema)
    }

    def fault(value: Any) -> str | None:
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        if error is None:
            return None
        message = str(error.message)
        for written, pattern in patterns.items():
            message = message.replace(written, pattern)
        return f"at {error.json_path}: {message}"

    return fault


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed in JSON")
