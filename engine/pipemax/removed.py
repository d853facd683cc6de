"""Say what replaces the commands, options and config keys that were removed.

Each is refused with a sentence for one release, so that a command line or a config of an earlier version does not end
in "no such option". ``docs/deploy/upgrade.md`` has the same table. An option of the job is a keyword argument in Python
too. This module knows nothing of what reads it.
"""

from collections.abc import Mapping
from typing import Any

COMMANDS: Mapping[str, str] = {
    "rehearse": "pipemax plan-capacity forecasts a table's hours and cost, and the settings of the engine config",
    "simulate": "pipemax plan-capacity forecasts a table, and python -m lab.paper compares PipeMax with the systems of "
    "the paper, in a checkout of the repository",
    "run-batch": "pipemax annotate --input-format openai-batch --batch-output FILE answers a file in OpenAI's batch "
    "format, and vllm run-batch does without Spark",
    "calibrate": "pipemax check-node checks and calibrates an engine in one start; --seconds is the time to measure, "
    "--out the file to write",
}
"""Removed commands of ``pipemax``, with what replaces each."""

_FLEET = "plan-capacity plans one node: N nodes take its hours / N and their start-up, for N times the price"
OPTIONS: dict[str, str] = {
    f"plan-capacity --{name}": _FLEET
    for name in ("nodes", "done-by", "budget", "start-up", "commit-every", "speed-spread", "lost-per-hour")
}
"""Removed options as ``COMMAND --OPTION``, with what replaces each; the job's command is ``annotate``."""

KEYS: Mapping[str, str] = {
    "virtual_node": "pipemax plan-capacity forecasts a table on a node that you do not have",
    "kv_offload": "new KV is copied to the host after each step, which was the default and is as fast on an H100 as "
    "layer by layer; leave the key out",
}
"""Removed keys of the engine config, nested ones with dots, with what replaces each."""


def removed_command(name: str) -> str | None:
    """Return what to tell about a command of ``pipemax``, or None if it was not removed."""
    return _sentence(f"pipemax {name}", COMMANDS.get(name))


def removed_option(command: str, option: str) -> str | None:
    """Return what to tell about an option such as ``--nodes``, or None if it was not removed."""
    return _sentence(option, OPTIONS.get(f"{command} {option}"))


def removed_argument(name: str) -> str | None:
    """Return what to tell about a keyword argument of the job's functions, or None if it was not removed."""
    return _sentence(name, OPTIONS.get(f"annotate --{name.replace('_', '-')}"))


def removed_key(name: str) -> str | None:
    """Return what to tell about a key of the engine config, or None if it was not removed."""
    return _sentence(name, KEYS.get(name))


def explain_option(error: Any, command: str) -> None:
    """Have a command line's error about an unknown option say what replaces it, if it was removed.

    Typer has no public name for that error; it has the option's name and a message.
    """
    replacement = removed_option(command, getattr(error, "option_name", None) or "")
    if replacement is not None:
        error.message, error.possibilities = replacement, None


def _sentence(name: str, instead: str | None) -> str | None:
    return None if instead is None else f"{name} was removed: {instead}."
