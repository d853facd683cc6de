"""Provide the functions ``pm_classify`` and ``pm_extract``, in SQL and in Python, after one ``register_functions``.

Their names and arguments follow the functions that warehouses have (``ai_classify``, ``ai_extract``). Each is a UDF of
``udf`` with a fixed prompt, whose answers are constrained to the labels or to the schema. SQL shows a UDF its literals
only row by row, when the query runs, so the task reads them from the first row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pipemax.wire import REFUSED, ErrorCode, GenerationSpec
from pipemax_spark.errors import JobError, OnError, RowFailedError
from pipemax_spark.executor.response_format import NULLABLE, SPARK_TYPE, compile_schema, load_schema
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.functions.udf import Columns, UdfTask, spark_function, udf_plan
from pipemax_spark.request.argument_types import checks_arguments, takes_fields
from pipemax_spark.request.formats import ResponseFormat, response_schema
from pipemax_spark.spark.session import current_session
from pipemax_spark.transform import TemplateVariables

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

CLASSIFY_TEMPLATE = (
    "Classify the text. Answer with exactly one of these labels: {labels}\n\nText:\n{text}\n\nLabel:"
)
EXTRACT_TEMPLATE = (
    "Extract from the text what this JSON schema asks for. Answer with JSON only; "
    "what the text does not say is null.\n\n"
    "Schema:\n{schema}\n\nText:\n{text}\n\nJSON:"
)
_TEXT = "{text}"
_FROM_ARGUMENTS = ("choice", "response_format", "regex", "grammar", "task")
"""Settings that the functions' arguments take the place of."""


_EXAMPLES = {
    "pm_classify": GenerationSpec(choice=("bug", "praise")),
    "pm_extract": GenerationSpec(
        response_format='{"type": "object", "properties": {"city": {"type": "string"}}}'
    ),
}
"""What the functions may ask for, which is known only once a query runs."""


class Kind(Enum):
    """One of the functions; the value is its name in SQL."""

    CLASSIFY = "pm_classify"
    EXTRACT = "pm_extract"

    @property
    def argument(self) -> str:
        """The name of its second argument."""
        return "labels" if self is Kind.CLASSIFY else "schema"


@checks_arguments
@takes_fields(GenerationSpec, response_format=ResponseFormat, chat_template_kwargs=TemplateVariables)
def register_functions(
    spark: "SparkSession",
    *,
    model: str | None = None,
    engine: Mapping[str, Any] | None = None,
    on_error: str = "row",
    engine_python: str | None = None,
    log_dir: str | None = None,
    classify_template: str = CLASSIFY_TEMPLATE,
    extract_template: str = EXTRACT_TEMPLATE,
    **generation: Any,
) -> None:
    """Register ``pm_classify(text, labels)`` and ``pm_extract(text, schema)`` in this session, for SQL and Python.

    ``pm_classify`` returns one of the labels (STRING); ``labels`` is an array of at least two texts. ``pm_extract``
    returns the JSON (STRING) of an object; ``schema`` is a JSON schema as text, or an array of names, each of a text
    or null. Both arguments must be literals. The result is null for a null text, and for a row that failed, unless
    ``on_error`` is ``fail``: then the query fails. Labels, a schema or a setting that the engine refuses fail it too.

    ``classify_template`` holds ``{text}`` and ``{labels}``, ``extract_template`` ``{text}`` and ``{schema}``. Other
    arguments are those of ``pipemax_udf``; ``max_tokens`` (256) bounds what is extracted.

    A small Spark job checks model and engine at once, on an executor; ``JobError`` says what is wrong.
    """
    for name in _FROM_ARGUMENTS:
        if generation.get(name):
            raise JobError(
                f"{name} is given to register_functions(); the functions' arguments say it, so leave it out"
            )
    policy = OnError.of(on_error)
    templates = {Kind.CLASSIFY: classify_template, Kind.EXTRACT: extract_template}
    parts = {kind: _template_parts(kind, template) for kind, template in templates.items()}
    plan = udf_plan(
        spark,
        model=model,
        engine=engine,
        engine_python=engine_python,
        log_dir=log_dir,
        examples=_EXAMPLES,
        **generation,
    )
    from pyspark.sql.types import StringType

    for kind in Kind:
        task = FunctionTask(kind, plan, parts[kind], fails=policy is OnError.FAIL)
        spark.udf.register(kind.value, spark_function(task, StringType()))


def pm_classify(col: "Column | str", labels: Sequence[str]) -> "Column":
    """Return the label of each text of ``col``: one of ``labels``, or null; see ``register_functions``.

    Raise ``JobError`` if the labels are no list of two or more different texts, or nothing was registered.
    """
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise JobError(f"labels is a {type(labels).__name__}; give a list of texts")
    _settings(Kind.CLASSIFY, list(labels))
    return _call(Kind.CLASSIFY, col, list(labels))


def pm_extract(col: "Column | str", schema: Any) -> "Column":
    """Return what each text of ``col`` says, as a struct of the schema's type, or null; see ``register_functions``.

    ``schema`` is anything that ``response_format`` may be and that is an object (a JSON schema, a Spark type such as
    ``"STRUCT<name: STRING, year: INT>"``, the class of a Pydantic model), or a list of names, each of a text or null.
    Raise ``JobError`` if it is none of these, or nothing was registered.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.pandas.types import from_arrow_type

    text = _schema_of_names(schema) if isinstance(schema, list | tuple) else response_schema(schema)
    settings = _settings(Kind.EXTRACT, text)
    parser = compile_schema(load_schema(settings["response_format"]))
    kind: Any = from_arrow_type(parser.arrow_type, prefer_timestamp_ntz=False)
    return F.from_json(_call(Kind.EXTRACT, col, text), kind)


def _call(kind: Kind, col: "Column | str", argument: Any) -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    spark = current_session()
    if spark is None or not spark.catalog.functionExists(kind.value):
        raise JobError(
            f"{kind.value} is not registered in this session; call register_functions(spark, …) first"
        )
    return F.call_function(kind.value, F.col(col) if isinstance(col, str) else col, F.lit(argument))


@dataclass(frozen=True, slots=True)
class FunctionTask:
    """The function of the UDF: turn columns of texts and of a literal into an array of answers, in the same order."""

    kind: Kind
    plan: TaskPlan
    template: tuple[str, str]
    """The template before and after the text."""
    fails: bool
    """Whether a row that fails ends the query."""

    def __call__(self, batches: Iterator[Columns]) -> Iterator[pa.Array]:
        rows = (self._checked(batch) for batch in batches)
        rows = (batch for batch in rows if len(batch[0]))
        first = next(rows, None)
        if first is None:
            return
        literal = first[1][0].as_py()
        settings = _settings(self.kind, literal)
        options = self.plan.options
        generation = replace(options.generation, **settings)
        plan = replace(self.plan, options=replace(options, generation=generation))
        shown = _shown(literal) if self.kind is Kind.CLASSIFY else _schema_shown(settings["response_format"])
        before, after = (part.replace(f"{{{self.kind.argument}}}", shown) for part in self.template)

        def prompts() -> Iterator[pa.Array]:
            for texts, arguments in _with_first(first, rows):
                self._check_literal(literal, arguments)
                text_type = texts.type
                yield pc.binary_join_element_wise(
                    pa.scalar(before, text_type), texts, pa.scalar(after, text_type), pa.scalar("", text_type)
                )

        for annotations in UdfTask(plan)(prompts()):
            self._fail_on(annotations.field("error").to_pylist())
            has_error = pc.is_valid(annotations.field("error"))
            texts = annotations.field("text")
            yield pc.if_else(has_error, pa.scalar(None, texts.type), texts)

    def _checked(self, columns: Columns) -> tuple[pa.Array, pa.Array]:
        """Return the texts and the literals. Raise ``JobError`` if these are not two columns of the right types."""
        wanted = f"{self.kind.value} takes a text and {_WANTED[self.kind]}"
        if not isinstance(columns, tuple) or len(columns) != 2:
            raise JobError(
                f"{wanted}; it was given {len(columns) if isinstance(columns, tuple) else 1} columns"
            )
        texts, arguments = columns
        if pa.types.is_null(texts.type):
            texts = texts.cast(pa.string())
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            raise JobError(f"{wanted}; the first argument is of the type {texts.type}")
        return texts, arguments

    def _check_literal(self, literal: Any, arguments: pa.Array) -> None:
        name = self.kind.argument
        if other := [value for value in arguments.to_pylist() if value != literal]:
            raise JobError(
                f"{name} of {self.kind.value} differ between rows: {_shown(literal)} and {_shown(other[0])}; give "
                f"{_WANTED[self.kind]}, as a literal"
            )

    def _fail_on(self, errors: Sequence[Mapping[str, str] | None]) -> None:
        for error in errors:
            if error is None or error["code"] == ErrorCode.EMPTY_PROMPT:  # a null text
                continue
            # These concern the settings, which are the same for all rows.
            is_refusal = error["code"] == ErrorCode.INVALID_PARAMETER or error["message"].startswith(REFUSED)
            if self.fails or is_refusal:
                raise RowFailedError(
                    f"{self.kind.value}: a row failed with {error['code']}: {error['message']}"
                )


_WANTED = {
    Kind.CLASSIFY: "labels, such as array('bug', 'question')",
    Kind.EXTRACT: "a schema: a JSON schema as text, or names such as array('person', 'city')",
}


def _with_first(
    first: tuple[pa.Array, pa.Array], others: Iterator[tuple[pa.Array, pa.Array]]
) -> Iterator[tuple[pa.Array, pa.Array]]:
    yield first
    yield from others


def _settings(kind: Kind, literal: Any) -> dict[str, Any]:
    """Return the fields of the generation that a literal stands for. Raise ``JobError`` for a wrong literal."""
    is_list = isinstance(literal, list) and all(isinstance(value, str) for value in literal)
    if kind is Kind.CLASSIFY:
        if not is_list or not literal:
            raise JobError(f"labels of pm_classify are {_shown(literal)}; give {_WANTED[kind]}")
        return _checked_by(GenerationSpec(choice=tuple(literal)), "labels", {"choice": tuple(literal)})
    if is_list and literal:
        literal = _schema_of_names(literal)
    if not isinstance(literal, str):
        raise JobError(f"the schema of pm_extract is {_shown(literal)}; give {_WANTED[kind]}")
    try:
        parser = compile_schema(load_schema(literal))
    except ValueError as error:
        raise JobError(
            f"the schema of pm_extract is {_shown(literal)}: {error}; give {_WANTED[kind]}"
        ) from error
    if not (pa.types.is_struct(parser.arrow_type) or pa.types.is_map(parser.arrow_type)):
        raise JobError(
            f"the schema of pm_extract is {_shown(literal)}, not that of an object with properties"
        )
    return {"response_format": literal}


def _checked_by(generation: GenerationSpec, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        generation.sampling()
    except ValueError as error:
        raise JobError(f"{name}: {error}") from error
    return settings


def _schema_of_names(names: Sequence[str]) -> str:
    """Return the JSON schema of an object with these properties, each a text or null."""
    if doubled := next((name for name in names if list(names).count(name) > 1), None):
        raise JobError(f"the schema of pm_extract has the name {doubled!r} twice; give it once")
    properties = {name: {"type": ["string", "null"]} for name in names}
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(names)}, ensure_ascii=False
    )


def _schema_shown(text: str) -> str:
    """Return a schema as the prompt shows it: without the marks of a Spark type, which say nothing to a model."""
    if SPARK_TYPE not in text and NULLABLE not in text:
        return text

    def plain(part: Any) -> Any:
        match part:
            case dict():
                return {key: plain(value) for key, value in part.items() if key not in (SPARK_TYPE, NULLABLE)}
            case list():
                return [plain(value) for value in part]
        return part

    return json.dumps(plain(load_schema(text)), ensure_ascii=False)


def _shown(literal: Any) -> str:
    """Return a literal as prompts and messages show it."""
    if isinstance(literal, list) and all(isinstance(value, str) for value in literal):
        return ", ".join(literal)
    return str(literal)


def _template_parts(kind: Kind, template: str) -> tuple[str, str]:
    """Return the template before and after the text. Raise ``JobError`` if it lacks a place."""
    before, text, after = template.partition(_TEXT)
    place = f"{{{kind.argument}}}"
    name = f"{kind.name.lower()}_template"
    if not text or _TEXT in after:
        raise JobError(f"{name} must hold {_TEXT} once")
    if place not in before + after:
        raise JobError(f"{name} must hold {place}")
    return before, after
