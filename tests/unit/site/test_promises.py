"""The table of promises names tests that exist, and says of each whether `make test` runs it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "promises.md"
NAMED = re.compile(r"`(tests/[^`]+)`( \(nightly\b)?")


def is_nightly(node: ast.expr | None) -> bool:
    return node is not None and bool(re.search(r"mark\.(long|parity_full)\b", ast.unparse(node)))


def nightly_tests(file: Path) -> dict[str, bool]:
    """Return for each test of a file whether it runs at night only."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    whole = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and is_nightly(node.value)
        for node in tree.body
    )
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [each for each in node.decorator_list if ast.unparse(each).startswith("pytest.mark.")]
            alone = any(is_nightly(mark.func if isinstance(mark, ast.Call) else mark) for mark in marks)
            found[node.name] = whole or alone
    return found


def fault(name: str, *, says_nightly: bool) -> str | None:
    path, _, function = name.partition("::")
    files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("test_*.py"))
    tests = {
        test: nightly for file in files if file.exists() for test, nightly in nightly_tests(file).items()
    }
    if function:
        tests = {test: nightly for test, nightly in tests.items() if test == function}
    if not tests:
        return f"{name}: there is no such test"
    nightly = all(tests.values())
    return None if nightly == says_nightly else f"{name}: nightly is {nightly}, the page says {says_nightly}"


def test_each_promise_names_tests_that_exist_and_says_which_are_nightly() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    named = [match for row in rows for match in NAMED.finditer(row)]
    assert len(named) > 60
    assert [told for match in named if (told := fault(match[1], says_nightly=bool(match[2])))] == []


def test_no_promise_is_given_twice() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    promises = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    named = [promise for promise in promises if promise.strip("-")]
    assert sorted(named) == sorted(set(named))
