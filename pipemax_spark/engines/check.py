"""Check engine and generation on an executor, in the engine's own environment, without starting an engine."""

import re
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pipemax.wire import PreflightReply, PreflightRequest, secret_variables
from pipemax_spark.errors import JobError
from pipemax_spark.executor.client import EngineOptions
from pipemax_spark.executor.engine_environment import engine_command, engine_environment
from pipemax_spark.executor.resources import gpu_environment
from pipemax_spark.executor.server_process import find_executor
from pipemax_spark.spark.executor_call import call_on_executor

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

_EXECUTOR_VARIABLE = "spark.executorEnv.{}"
_REDACTION = "spark.redaction.regex"
_SPARKS_REDACTION = "(?i)secret|password|token|access[.]?key"
"""Spark's default."""
_TIMEOUT_S = 600
_SHOWN_LINES = 3
_REMEMBERED_S = 600
_fine: dict[tuple[str | None, str | None, bytes, str | None, int | None], tuple[float, PreflightReply]] = {}
"""Checks that found no error: request → (time of the reply, reply)."""


def recent_preflight(
    spark: "SparkSession",
    request: PreflightRequest,
    options: EngineOptions,
    *,
    profile: "ResourceProfile | None" = None,
) -> PreflightReply:
    """Run ``run_preflight``, unless the same request passed in this application within the last ten minutes.

    Importing the engine's environment takes seconds, which a notebook would otherwise wait for at each call. A model
    that is changed in place meanwhile goes unnoticed; the running engine has not noticed the change either.
    """
    profile_id = None if profile is None else profile.id
    application = spark.conf.get("spark.app.id", None)
    # Over Spark Connect, sessions of one application can have different Python packages.
    session = getattr(spark, "session_id", None)
    asked = (application, session, request.to_bytes(), options.engine_python, profile_id)
    if asked not in _fine or time.monotonic() - _fine[asked][0] > _REMEMBERED_S:
        reply = run_preflight(spark, request, options, profile=profile)
        _fine[asked] = time.monotonic(), reply
    return _fine[asked][1]


def run_preflight(
    spark: "SparkSession",
    request: PreflightRequest,
    options: EngineOptions,
    *,
    profile: "ResourceProfile | None" = None,
) -> PreflightReply:
    """Check engine and generation on an executor.

    Raise ``JobError`` with the message from the engine's side if the check fails.

    ``profile`` is the resource profile of the stage that will run the engine.
    """
    keys = secret_variables(request.engine)
    settings = {name: spark.conf.get(name, None) for name in map(_EXECUTOR_VARIABLE.format, keys)}
    check_hidden(
        [name for name, value in settings.items() if value], spark.conf.get(_REDACTION, _SPARKS_REDACTION)
    )
    ask = partial(_ask, options.engine_python, request.to_bytes(), options.gpu_discovery_script, keys)
    reply = PreflightReply.from_bytes(call_on_executor(spark, ask, profile=profile).encode())
    if reply.error:
        raise JobError(reply.error)
    return reply


def check_hidden(settings: Sequence[str], redaction: str | None) -> None:
    """Raise ``JobError`` for a setting with a key that Spark's web pages and event logs would show."""
    for name in settings:
        if not re.search(redaction or _SPARKS_REDACTION, name):
            raise JobError(
                f"{name} holds a key, and Spark shows it in its pages and event logs: {_REDACTION} hides no such name; "
                f"set {_REDACTION}='(?i)secret|password|token|key', or have your cluster's store of secrets set the "
                "variable"
            )


def _ask(engine_python: str | None, payload: bytes, discovery_script: str | None, keys: Sequence[str]) -> str:
    """Run the check on this executor; return its reply, or a reply that says why there is none."""
    command = engine_command(engine_python, "pipemax", "preflight")
    gpus = gpu_environment(find_executor().process.pid, discovery_script)
    try:
        done = subprocess.run(
            command,
            input=payload,
            capture_output=True,
            env=engine_environment(keys=keys) | gpus,
            cwd="/",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return _failure(
            f"engine-python {command[0]!r} cannot be run on an executor: {error}; give the path of a Python there"
        )
    except subprocess.TimeoutExpired:
        return _failure(f"engine-python {command[0]!r} has not answered within {_TIMEOUT_S} s")
    if done.returncode != 0 or not done.stdout.strip():
        errors = done.stderr.decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        return _failure(
            f"engine-python {command[0]!r} could not check the engine (exit status {done.returncode}): "
            f"{' | '.join(errors)}. Is pipemax-spark with its engine extra installed there?"
        )
    return done.stdout.decode().strip().splitlines()[-1]


def _failure(error: str) -> str:
    return PreflightReply(error=error).to_bytes().decode()
