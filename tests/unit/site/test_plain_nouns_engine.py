"""Names say what they hold: the words below are no name of a variable, an attribute or a parameter."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS = {"told", "given", "own", "found", "each", "most", "which"}
ROOMS = (
    *(
        f"engine/pipemax/{room}"
        for room in ("wire", "serve", "replicas", "node", "answers", "checkpoint", "cli")
    ),
    *(f"pipemax_spark/{room}" for room in ("request", "executor")),
)
FILES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")] + [
    *(ROOT / "engine/pipemax").glob("*.py")
]


def names_made(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of all that the source makes, for what it uses was made by it or by a library."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


@pytest.mark.parametrize("room", [*ROOMS, "engine/pipemax"])
def test_names_are_nouns(room: str) -> None:
    files = [path for path in FILES if path.is_relative_to(ROOT / room)]
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in files
        for line, name in names_made(path.read_text(encoding="utf-8"))
        if name in WORDS
    ]
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "told = 1",
        "row.given = 1",
        "def f(own): pass",
        "[each for each in x]",
        "def which(): pass",
        "(found := 1)",
    ],
)
def test_a_name_that_says_nothing_is_noticed(source: str) -> None:
    assert {name for _, name in names_made(source)} & WORDS
