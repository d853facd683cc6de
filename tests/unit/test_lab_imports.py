"""``lab`` runs only by hand, so what a move in the product breaks there is found here, without running anything."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"pipemax": ROOT / "engine", "pipemax_spark": ROOT, "lab": ROOT}


def module_file(module: str) -> Path | None:
    """Return the file of one of our modules; None if there is none."""
    base = PACKAGES[module.split(".")[0]].joinpath(*module.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


@cache
def names_of(file: Path) -> frozenset[str]:
    """Return the names that a module binds outside of its functions and classes."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
                continue
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return frozenset(names)


def missing_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in PACKAGES:
            continue
        assert node.module is not None
        source = module_file(node.module)  # None for a folder without a file of its own
        names = names_of(source) if source is not None else frozenset()
        for alias in node.names:
            if alias.name not in names and module_file(f"{node.module}.{alias.name}") is None:
                yield f"{file.relative_to(ROOT)}: {node.module}.{alias.name}"


def test_what_lab_imports_of_the_product_is_there() -> None:
    files = sorted((ROOT / "lab").rglob("*.py"))
    assert len(files) > 50
    assert [line for file in files for line in missing_imports(file)] == []
