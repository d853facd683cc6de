"""The names along a row's way, and along a block's, are those of the code."""

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "ARCHITECTURE.md"
PACKAGES = ("pipemax_spark", "pipemax", "pipemax.vllm_ext")


def names() -> list[str]:
    """Return each name that begins with a module, as ``rows.left.rows_left``."""
    ways = PAGE.read_text(encoding="utf-8").partition("## A row's way")[2]
    found = re.findall(r"`([a-z_]+(?:\.\w+)+)`", ways)
    return sorted({name for name in found if not name.endswith((".py", ".md", ".toml"))})


def resolve(name: str) -> object:
    """Return the module, class or function of this name; ``LookupError`` where there is none."""
    parts = name.split(".")
    for package in PACKAGES:
        for length in range(len(parts), 0, -1):
            try:
                module = importlib.import_module(".".join([package, *parts[:length]]))
            except ModuleNotFoundError:
                continue
            try:
                return reduce(getattr, parts[length:], module)
            except AttributeError:
                break
    raise LookupError(name)


@pytest.mark.parametrize("name", names())
def test_a_name_on_the_way_is_there(name: str) -> None:
    assert resolve(name) is not None


def test_there_are_names_and_one_that_is_not_there_is_noticed() -> None:
    assert len(names()) > 20
    with pytest.raises(LookupError):
        resolve("rows.left.rows_right")
