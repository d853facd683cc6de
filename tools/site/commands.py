"""Check the command blocks of a page: what they call must exist, and must have the options that they name.

Nothing is run. Known commands are ``make``, ``pipemax``, ``pipemax-annotate``, ``jobs/annotate.py`` under
``spark-submit``, scripts and modules of ``lab`` and ``tools``, and test files given to pytest.
"""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

_BLOCK = re.compile(
    r"(?ms)^```(?:bash|console|sh)\n(.*?)^```|(?:(?<=\n\n)|\A)((?:^ {4}(?! ).*\n?(?:^ {4,}.*\n?|^\n(?= {4}))*)+)"
)
_COMMANDS = re.compile(
    r"^(?:\.venv/bin/)?(?:make|pipemax|pipemax-annotate|spark-submit|python|pytest|bash|tools/\S+\.sh)(?:\s|$)"
)


def problems(markdown: str, root: Path) -> Iterator[str]:
    """Yield a sentence for each command of the page that would not run in the repository at ``root``."""
    for match in _BLOCK.finditer(markdown):
        text = (match[1] or match[2]).replace("\\\n", " ")
        for line in text.splitlines():
            command = re.sub(r"\s+#\s.*$", "", line.strip()).removeprefix("$ ")
            if _COMMANDS.match(command):
                yield from _problems(command, root)


def _problems(command: str, root: Path) -> Iterator[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield f"{command!r} is not a shell command: {error}"
        return
    words = [word.removeprefix(".venv/bin/") for word in words]
    match words:
        case ["make", *targets]:
            known = set(
                re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            )
            missing = [word for word in targets if "=" not in word and word not in known]
        case ["pipemax" | "pipemax-annotate", *_]:
            missing = list(_unknown_words(words[0], words[1:]))
        case ["spark-submit", *rest]:
            script = next((i for i, word in enumerate(rest) if word.endswith("jobs/annotate.py")), None)
            missing = [] if script is None else list(_unknown_words("pipemax-annotate", rest[script + 1 :]))
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
            missing = [word for word in rest if "/" in word and not (root / word.partition("::")[0]).exists()]
        case ["python", "-m", module, *_]:
            path = root / module.replace(".", "/")
            own = module.split(".")[0] in {"bench", "lab", "tests", "tools"}
            missing = [module] if own and not (path.with_suffix(".py").exists() or path.is_dir()) else []
        case ["python" | "bash", script, *_] if "/" in script and not script.startswith(("/", "-")):
            missing = [] if (root / script).exists() else [script]
        case [script, *_] if script.startswith("tools/"):
            missing = [] if (root / script).exists() else [script]
        case _:
            missing = []
    for word in missing:
        yield f"{command!r}: there is no {word}"


def _unknown_words(program: str, words: list[str]) -> Iterator[str]:
    command = _program(program)
    while (commands := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
        if words[0] not in commands:
            yield f"command {words[0]}"
            return
        command, words = commands[words[0]], words[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        name = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]*", name) and name not in known | {"--help"}:
            yield f"option {name}"


@cache
def _program(name: str) -> Any:
    from pipemax_spark.cli import app, command

    return typer.main.get_command(command() if name == "pipemax" else app)
