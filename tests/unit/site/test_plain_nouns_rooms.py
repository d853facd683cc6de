"""Variables, attributes and parameters of these rooms are nouns that say what they hold."""

import ast
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[3] / "engine" / "pipemax"
ROOMS = ("control", "policy", "presets", "sim", "transfer", "vllm_ext")
NO_NOUNS = {"told", "given", "own", "found", "each", "most", "which"}


def defined_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.arg(arg=name) | ast.FunctionDef(name=name):
                names.add(name)
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_names_are_nouns(room: str) -> None:
    faults = {
        (path.name, name)
        for path in (ENGINE / room).rglob("*.py")
        for name in defined_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.lstrip("_") in NO_NOUNS
    }
    assert faults == set()
