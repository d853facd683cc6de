"""Read from a job's options what a cascade promises and compares, and refuse what it cannot have."""

import json
from dataclasses import replace

from pipemax.wire import GenerationSpec
from pipemax_spark.cascade.equality import Answers, Equality
from pipemax_spark.cascade.json_sets import Schema
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.errors import JobError
from pipemax_spark.executor.questions import Question
from pipemax_spark.job.cascade_answers import ComparedAnswer
from pipemax_spark.options import JobOptions
from pipemax_spark.request.generation import for_engine, with_task
from pipemax_spark.rows.annotated import ANNOTATION


def promise_of(options: JobOptions) -> Promise:
    """Return what is promised of each question, or of the one answer. ``JobError`` says which share is wrong.

    All questions together have the confidence of the options, because the risks of each add up to its risk.
    """
    try:
        return Promise(agree=options.agree, confidence=options.confidence).of_each(max(1, len(options.ask)))
    except ValueError as error:
        raise JobError(f"--cascade: {error}") from None


def answers_of(options: JobOptions) -> tuple[ComparedAnswer, ...]:
    """Return what is compared. Raise ``JobError`` for answers that cannot be, or options unlike them."""
    generation = options.generation
    refused = {
        "--incremental and --cascade-sample": options.incremental and options.cascade_sample,
        "--reuse": options.reuse,
        "--compute-each": options.compute_each,
        "--canary": options.canary is not None,
        "--batch-output": options.batch_output,
        "--temperature without --seed": any(
            one.temperature != 0 and one.seed is None for one in options.generations
        ),
        f"--task {generation.task}": generation.task == "embed",
    }
    if name := next((name for name, value in refused.items() if value), None):
        raise JobError(f"--cascade cannot be combined with {name}; leave one of them out")
    if options.cascade is not None and options.cascade.get("model") == options.engine.get("model"):
        raise JobError("--cascade names the same model as --engine; name a smaller one")
    if options.ask:
        return _of_questions(options)
    kind = _kind_of(generation, options.agree_tolerance, "")
    tolerance, fields = options.agree_tolerance, options.agree_fields
    return (_compared(ANNOTATION, generation, kind, tolerance=tolerance, fields=fields),)


def _of_questions(options: JobOptions) -> tuple[ComparedAnswer, ...]:
    """Return what is compared of each question: a field is named as question.field, a tolerance is for all schemas."""
    kinds = {
        question.name: _kind_of(
            question.generation, options.agree_tolerance, f"the question {question.name!r}: "
        )
        for question in options.ask
    }
    for field in options.agree_fields:
        if field.partition(".")[0] not in kinds or "." not in field:
            raise JobError(
                f"--agree-fields names {field!r}; with --ask, write question.field, of the questions "
                f"{', '.join(map(repr, kinds))}"
            )
    has_schemas = Answers.JSON in kinds.values()

    def compared(question: Question) -> ComparedAnswer:
        name, kind = question.name, kinds[question.name]
        return _compared(
            name,
            question.generation,
            kind,
            tolerance="0" if kind is Answers.TEXT and has_schemas else options.agree_tolerance,
            fields=tuple(
                field.partition(".")[2] for field in options.agree_fields if field.partition(".")[0] == name
            ),
        )

    return tuple(map(compared, options.ask))


def _kind_of(generation: GenerationSpec, tolerance: str, whose: str) -> Answers:
    """Return how answers are compared; ``whose`` begins the sentence of the error."""
    if generation.task == "classify":
        return Answers.CLASSES
    if generation.task == "score":
        if tolerance == "0":
            raise JobError(
                "--cascade compares the scores of two models, which are hardly ever equal; give --agree-tolerance, "
                "such as 0.05"
            )
        return Answers.NUMBER
    if generation.choice or generation.regex or generation.grammar:
        return Answers.TEXT
    if generation.response_format is None:
        raise JobError(
            f"--cascade: {whose}answers are compared, and free text is hardly ever equal; give a choice, regex, "
            "grammar or response-format"
        )
    return Answers.JSON


def _compared(
    column: str, generation: GenerationSpec, kind: Answers, *, tolerance: str, fields: tuple[str, ...]
) -> ComparedAnswer:
    is_json = kind is Answers.JSON
    schema = Schema.of(json.loads(generation.response_format or "{}")) if is_json else Schema()
    try:
        equality = Equality(answers=kind, tolerance=tolerance, fields=fields, schema=schema)
    except ValueError as error:
        raise JobError(f"--cascade: {error}") from None
    return ComparedAnswer(column=column, generation=generation, equality=equality)


def small_options(options: JobOptions) -> JobOptions:
    """Return the options of the small model's job: it says how sure it was, and thinks only if its engine does."""
    assert options.cascade is not None, "the job has no cascade"
    engine, _ = with_task(options.cascade, options.generation)
    thinks = engine.get("reasoning_parser") is not None

    def of_small(generation: GenerationSpec) -> GenerationSpec:
        generation = replace(generation, logprobs=not generation.is_pooling)
        if not thinks:
            return replace(generation, include_reasoning=None, thinking_tokens=None, reasoning_effort=None)
        return for_engine(generation, engine)

    ask = tuple(replace(question, generation=of_small(question.generation)) for question in options.ask)
    return replace(options, engine=engine, cascade=None, generation=of_small(options.generation), ask=ask)
