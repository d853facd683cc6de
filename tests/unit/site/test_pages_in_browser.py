"""The documentation site, opened from a folder in Chromium: every page on a desktop and on a phone, and the search."""

import html
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import needs_browser, open_page

LONGEST_GUIDE_PX = 5 * 1_000
"""Five screens of a desktop."""
ROOT = Path(__file__).parents[3]
pytestmark = needs_browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
        capture_output=True,
    )
    return directory


def shown_of(address: str, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """Return the page's document once its scripts have run, and what it wrote to the console."""
    document, console = open_page(address, profile, "--virtual-time-budget=600000", *flags)
    return html.unescape(document), console


@pytest.mark.long  # a browser opens every page
def test_no_page_is_too_wide_or_too_long_or_breaks_a_word_or_writes_to_the_console(
    site: Path, tmp_path: Path
) -> None:
    names = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    settings = f"const PAGES = {json.dumps(names)}, SITE = {json.dumps(site.as_uri() + '/')};"
    script = (Path(__file__).parent / "measure_pages.js").read_text(encoding="utf-8")
    opener = tmp_path / "open.html"
    opener.write_text(
        f'<meta charset="utf-8"><body><script>{settings}{script}</script></body>', encoding="utf-8"
    )
    allowed = (
        "--disable-web-security",
        "--allow-file-access-from-files",
    )  # so that one page may look into others
    shown, console = shown_of(opener.as_uri(), tmp_path / "profile", *allowed)
    pages = json.loads(shown.partition("RESULT")[2].rpartition("END")[0])
    assert len(pages) == 2 * len(names)
    assert [page for page in pages if page["content"] > page["width"] or page["broken"]] == []
    guides = [page for page in pages if page["path"].startswith("guide/") and page["width"] == 1_280]
    assert guides
    assert {page["path"]: page["height"] for page in guides if page["height"] > LONGEST_GUIDE_PX} == {}
    assert console == []


@pytest.mark.parametrize("words", ["EMR", "A100", "out of memory", "license"])
def test_the_search_finds_what_users_look_for_in_a_site_that_is_opened_from_a_folder(
    site: Path, tmp_path: Path, words: str
) -> None:
    shown, console = shown_of(
        f"{site.as_uri()}/index.html?q={words.replace(' ', '%20')}", tmp_path / "profile"
    )
    assert 'class="md-search-result__item"' in shown
    assert console == []
