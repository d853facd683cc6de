"""How the product's code is written, by its syntax trees: few arguments, and names that say what they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED_PLAINLY = (
    *("pipemax_spark/cascade", "pipemax_spark/engines", "pipemax_spark/functions", "pipemax_spark/job"),
    *("pipemax_spark/report", "pipemax_spark/rows", "pipemax_spark/spark", "pipemax_spark/storage"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pipemax_spark").glob("*.py")),
)
"""Rooms, and modules of the hall."""
VAGUE = frozenset({"told", "given", "own", "found", "each", "most", "which"})
HANDED_THE_JOB = ("pipemax_spark/job", "pipemax_spark/report")
MOST_ARGUMENTS = 6


def trees(place: str) -> Iterator[tuple[str, ast.Module]]:
    path = ROOT / place
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def names_made(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, attribute, parameter and function that the code makes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case _:
                pass


def vague_names(tree: ast.AST) -> list[str]:
    return [f"line {line}: {name}" for line, name in names_made(tree) if name.strip("_") in VAGUE]


def number_of_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    known = function.args
    names = [each.arg for each in (*known.posonlyargs, *known.args, *known.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


@pytest.mark.parametrize("place", NAMED_PLAINLY)
def test_names_are_nouns_that_say_what_they_hold(place: str) -> None:
    assert {file: names for file, tree in trees(place) if (names := vague_names(tree))} == {}


def test_a_vague_name_is_noticed_wherever_it_is_made() -> None:
    code = """
class Told:
    given: int
    def _told(self, own, *, most=1):
        self._found = [each for each in own]
        if (which := most): pass
        for found, _ in (): pass
        match own:
            case [*given]: pass
"""
    lines = {name.partition(": ")[2] for name in vague_names(ast.parse(code))}
    assert lines == {"given", "_told", "own", "most", "_found", "each", "which", "found"}


@pytest.mark.parametrize("place", HANDED_THE_JOB)
def test_no_function_of_the_job_takes_more_than_six_arguments(place: str) -> None:
    many = {
        f"{file}: {node.name}": number
        for file, tree in trees(place)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (number := number_of_arguments(node)) > MOST_ARGUMENTS
    }
    assert many == {}


@pytest.mark.parametrize("place", [*HANDED_THE_JOB, "pipemax_spark/table.py", "pipemax_spark/transform.py"])
def test_which_rows_are_left_is_asked_at_one_door(place: str) -> None:
    asking = {
        file
        for file, tree in trees(place)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "pipemax_spark.rows.left"
    }
    assert asking == set(), "rows.remaining.Remaining is the door"


def test_arguments_of_all_kinds_are_counted() -> None:
    (function,) = ast.parse("def f(self, a, /, b, *, c, d=1, **rest): pass").body
    assert isinstance(function, ast.FunctionDef)
    assert number_of_arguments(function) == 4
