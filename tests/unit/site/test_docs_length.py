"""What a user has to read stays short enough to be read."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MOST_WORDS = 45_000
MOST_ON_ONE_PAGE = 7_000


def words(text: str) -> int:
    """Count words as a reader does: neither tables' rules nor the addresses of links."""
    return len(re.findall(r"\w[\w'’.-]*", re.sub(r"\]\([^)]*\)", "]", text)))


PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_documentation_has_at_most_45_000_words() -> None:
    counts = {page.relative_to(ROOT): words(page.read_text(encoding="utf-8")) for page in PAGES}
    assert len(counts) > 30
    assert sum(counts.values()) <= MOST_WORDS, sorted(counts.items(), key=lambda count: -count[1])[:5]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_read_at_a_sitting(page: Path) -> None:
    assert words(page.read_text(encoding="utf-8")) <= MOST_ON_ONE_PAGE
