"""Read the questions that a job or ``annotate()`` asks about each row: names, templates, and settings of their own."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.executor.questions import Question
from pipemax_spark.request.argument_types import checked_value, did_you_mean
from pipemax_spark.request.formats import response_schema

ANNOTATION = "annotation"
_HINTS = get_type_hints(GenerationSpec)
_CHECKED_ELSEWHERE = ("response_format", "chat_template_kwargs")
_SETTINGS = tuple(field.name for field in fields(GenerationSpec) if field.name != "system")


def read_questions(asked: Mapping[str, Any], generation: GenerationSpec) -> tuple[Question, ...]:
    """Return the questions of a mapping: name → template, or a mapping with ``template`` and settings.

    Settings that a question does not name are those of ``generation``. ``JobError`` says what is wrong.
    """
    questions = tuple(_question(name, value, generation) for name, value in asked.items())
    seen: dict[str, str] = {}
    for name in asked:
        if name.lower() in (seen | {ANNOTATION: ANNOTATION}):
            raise JobError(f"ask: {name!r} is the name of another column of the result; choose another name")
        seen[name.lower()] = name
    if questions and generation.response_format is not None:
        raise JobError(
            "response-format is given together with ask; give each question its own response_format"
        )
    return questions


def asked_of_text(items: Sequence[str], read: Any) -> dict[str, Any]:
    """Return the mapping for ``read_questions`` of what a command line gives: ``name=template``, or a file's path.

    ``read`` returns a file's text. A file is YAML (or JSON) with a mapping from names to templates or to settings.
    """
    import yaml

    asked: dict[str, Any] = {}
    for item in items:
        name, separator, template = item.partition("=")
        if separator and re.fullmatch(r"\w+", name.strip()):
            questions: Any = {name.strip(): template.replace("\\n", "\n")}
        else:
            try:
                questions = yaml.safe_load(read(item))
            except yaml.YAMLError as error:
                raise JobError(f"ask file {item!r} cannot be read: {' '.join(str(error).split())}") from error
            if not isinstance(questions, dict) or not questions:
                raise JobError(
                    f"ask file {item!r} must hold a mapping: name: template, or name: {{template: …}}"
                )
        if doubled := sorted(asked.keys() & questions.keys()):
            raise JobError(f"ask: {doubled[0]!r} is asked twice; give each question its own name")
        asked |= questions
    return asked


def _question(name: object, value: Any, generation: GenerationSpec) -> Question:
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise JobError(f"ask: {name!r} cannot be a column's name; use letters, digits and '_'")
    changes = dict(value) if isinstance(value, Mapping) else {"template": value}
    template = changes.pop("template", None)
    if not isinstance(template, str) or not template.strip():
        raise JobError(f"ask: question {name!r} has no template, which is the text that follows the prompt")
    if unknown := sorted(changes.keys() - set(_SETTINGS)):
        raise JobError(
            f"ask: question {name!r} has {unknown[0]!r}.{did_you_mean(str(unknown[0]), _SETTINGS)} It may have "
            f"template, {', '.join(_SETTINGS)}"
        )
    for field_name, change in changes.items():
        try:
            checked = (
                change
                if field_name in _CHECKED_ELSEWHERE
                else checked_value(field_name, change, _HINTS[field_name])
            )
        except JobError as error:
            raise JobError(f"ask: question {name!r}: {error}") from error
        changes[field_name] = tuple(checked) if isinstance(checked, list) else checked
    if isinstance(variables := changes.get("chat_template_kwargs"), Mapping):
        changes["chat_template_kwargs"] = json.dumps(variables)
    if changes.get("response_format") is not None:
        changes["response_format"] = response_schema(changes["response_format"])
    try:
        settings = replace(generation, **changes)
        settings.sampling()
    except (ValueError, TypeError) as error:
        raise JobError(f"ask: question {name!r}: {error}") from error
    return Question(name=name, template=template, generation=settings)
