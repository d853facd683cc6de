"""Read classes from Python sources without importing them: which methods they have, with which parameters.

vLLM's modules take seconds to import, some need a GPU, and the vLLM to be checked may be an unpacked wheel.
"""

import ast
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def installed_file(path: str) -> ast.Module | None:
    """Parse a file of the installed vLLM; ``None`` without it, or without vLLM."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return None
    try:
        return ast.parse((Path(vllm.origin).parent / path).read_text(encoding="utf-8"))
    except OSError:
        return None


class Sources:
    """A package's tree of sources. ``root`` is the directory that holds the package."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._module = cache(self._read)
        self._lineage = cache(self._find_lineage)
        self._names = cache(self._find_names)

    def parameters(self, name: str, method: str) -> tuple[str, ...] | None:
        """Return the names of a method's parameters, of the class or of the base that has it; None without one.

        ``name`` is the dotted name of the class, or of a module for a function of it.
        """
        owners: Iterable[ast.ClassDef | ast.Module] = self._lineage(name)
        if not owners and (module := self._module(name)) is not None:
            owners = (module,)
        for owner in owners:
            for node in owner.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
                    return _parameters(node.args)
        return None

    def uses(self, name: str, attribute: str) -> bool:
        """Tell whether the class or a base names an attribute: in a method, or in its body."""
        return attribute in self._names(name)

    def _find_lineage(self, name: str) -> tuple[ast.ClassDef, ...]:
        """Return the class and its bases, as far as their sources are in the tree."""
        module, _, short = name.rpartition(".")
        tree = self._module(module)
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == short:
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                homes = [self._home_of(module, base.id) for base in bases if isinstance(base, ast.Name)]
                return (node, *(owner for home in homes for owner in self._lineage(home)))
        return ()

    def _find_names(self, name: str) -> frozenset[str]:
        names: set[str] = set()
        for node in (node for owner in self._lineage(name) for node in ast.walk(owner)):
            match node:
                case ast.Attribute(attr=attribute) | ast.Name(id=attribute) | ast.FunctionDef(name=attribute):
                    names.add(attribute)
                case ast.Constant(value=str(attribute)):  # of __slots__
                    names.add(attribute)
        return frozenset(names)

    def _read(self, module: str) -> ast.Module | None:
        path = self._root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            try:
                return ast.parse(file.read_text(encoding="utf-8"))
            except (FileNotFoundError, NotADirectoryError):
                continue
        return None

    def _home_of(self, module: str, name: str) -> str:
        """Return the dotted name of what a module calls by this name: its own, or what it imports from elsewhere."""
        tree = self._module(module)
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"{node.module}.{alias.name}"
        return f"{module}.{name}"


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg is not None:
        named.append(f"*{arguments.vararg.arg}")
    named += [argument.arg for argument in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        named.append(f"**{arguments.kwarg.arg}")
    return tuple(named)
