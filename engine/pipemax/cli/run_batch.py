"""``pipemax run-batch``: answer a file of requests in OpenAI's batch format, without Spark or a table."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, TextIO

import typer

from pipemax.cli.common import engine_config, one_line_errors
from pipemax.cli.ending import ends_on_sigterm
from pipemax.generation import Completion, GenerationRequest

if TYPE_CHECKING:
    from pipemax.cli.batch_file import BatchLine

_IN_FLIGHT = 4096
"""Requests in the engine at once: more than it runs, so that it never waits for the file."""
_TOLD_EVERY_S = 10.0


class BatchEngine(Protocol):
    """What a batch needs of an engine."""

    def submit(self, requests: list[GenerationRequest]) -> None: ...

    def poll(self, timeout_s: float) -> list[Completion]: ...

    def set_input_open(self, is_open: bool) -> None: ...


def run_batch(
    input_file: Annotated[
        Path,
        typer.Option(
            "--input", "-i", exists=True, dir_okay=False, help="File of requests, a JSON object a line."
        ),
    ],
    output_file: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File of answers; if it exists, requests answered there are left out."
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or hub name; default: the one in --engine.")
    ] = None,
    engine: Annotated[Path | None, typer.Option(help="Engine config, a YAML file.")] = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format (/v1/chat/completions and /v1/completions).

    Answers are written as they come, in any order, each with its request's custom_id. Run the same command again after
    an interruption: it answers the rest, and requests that failed. The engine has one model, whatever a request's
    model says.

    Example: pipemax run-batch --input requests.jsonl --output answers.jsonl --model /models/llama
    """
    from pipemax.api import OfflineEngine
    from pipemax.cli.batch_file import read_done, read_ids, read_lines

    with one_line_errors(), ends_on_sigterm():
        config = engine_config(model, engine)
        with input_file.open(encoding="utf-8") as file:
            num_requests = len(read_ids(file))
        done = read_done(output_file)
        with (
            OfflineEngine(config) as running,
            input_file.open(encoding="utf-8") as requests,
            output_file.open("a", encoding="utf-8") as answers,
        ):
            failed = answer_all(running, read_lines(requests, done=done), answers, model=config.model)
    typer.echo(f"{num_requests:,} requests, {len(done):,} answered earlier, {failed:,} failed: {output_file}")
    if failed:
        raise typer.Exit(1)


def answer_all(engine: BatchEngine, lines: "Iterator[BatchLine]", answers: TextIO, *, model: str) -> int:
    """Answer all lines, and write each answer as a line. Return how many failed."""
    from pipemax.cli.batch_file import answer_of, fault_of

    waiting: dict[str, BatchLine] = {}
    failed = written = 0
    told_s = time.monotonic()
    is_open = True
    engine.set_input_open(True)
    while is_open or waiting:
        fresh: list[GenerationRequest] = []
        while is_open and len(waiting) < _IN_FLIGHT:
            line = next(lines, None)
            if line is None:
                is_open = False
                engine.set_input_open(False)
            elif line.request is None:
                failed += 1
                _write(answers, fault_of(line))
            else:
                waiting[line.custom_id] = line
                fresh.append(line.request)
        if fresh:
            engine.submit(fresh)
        for completion in engine.poll(timeout_s=1.0) if waiting else []:
            failed += completion.error is not None
            written += 1
            line = waiting.pop(completion.request_id)
            _write(answers, answer_of(line, completion, model=model, created_s=int(time.time())))
        answers.flush()
        if time.monotonic() - told_s >= _TOLD_EVERY_S:
            told_s = time.monotonic()
            typer.echo(f"{written:,} answered, {len(waiting):,} in the engine", err=True)
    return failed


def _write(answers: TextIO, line: dict[str, object]) -> None:
    answers.write(json.dumps(line, ensure_ascii=False) + "\n")
