"""Read a cascade's promise and equality from a job's options, and refuse what a cascade cannot have."""

import json

from pipemax_spark.cascade.equality import Answers, Equality
from pipemax_spark.cascade.json_sets import Schema
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.errors import JobError
from pipemax_spark.options import JobOptions


def promise_of(options: JobOptions) -> Promise:
    """Return what is promised. ``JobError`` says which share is wrong."""
    try:
        return Promise(agree=options.agree, confidence=options.confidence)
    except ValueError as error:
        raise JobError(f"--cascade: {error}") from None


def equality_of(options: JobOptions) -> Equality:
    """Return when two answers agree. Raise ``JobError`` for answers that cannot be compared, or options unlike them."""
    generation = options.generation
    refused = {
        "--incremental": options.incremental,
        "--ask": options.ask,
        "--reuse": options.reuse,
        "--compute-each": options.compute_each,
        "--canary": options.canary is not None,
        "--batch-output": options.batch_output,
        "--temperature without --seed": generation.temperature != 0 and generation.seed is None,
        f"--task {generation.task}": generation.task in ("embed", "score"),
    }
    if name := next((name for name, value in refused.items() if value), None):
        raise JobError(f"--cascade cannot be combined with {name}; leave one of them out")
    if options.cascade is not None and options.cascade.get("model") == options.engine.get("model"):
        raise JobError("--cascade names the same model as --engine; name a smaller one")
    is_text = generation.choice or generation.regex or generation.grammar or generation.task == "classify"
    if not is_text and generation.response_format is None:
        raise JobError(
            "--cascade compares answers, and free text is hardly ever equal; give --choice, --regex, --grammar or "
            "--response-format"
        )
    schema = Schema() if is_text else Schema.of(json.loads(generation.response_format or "{}"))
    try:
        return Equality(
            answers=Answers.TEXT if is_text else Answers.JSON,
            tolerance=options.agree_tolerance,
            fields=options.agree_fields,
            schema=schema,
        )
    except ValueError as error:
        raise JobError(f"--cascade: {error}") from None
