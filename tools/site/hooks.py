"""MkDocs' hooks for the documentation site: pages made from the code, the repository's own pages, and checks.

The reference pages are written by ``reference``. ARCHITECTURE.md, CONTRIBUTING.md and CHANGELOG.md stay where GitHub
looks for them, and get their links rewritten. ``commands`` checks every command block. A warning ends a strict build.
"""

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

import commands
import reference
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
log = logging.getLogger("mkdocs.plugins.pipemax")

_CODE = re.compile(r"(<pre.*?</pre>)|<code>([^<]*)</code>", re.DOTALL)
_README_SECTION = re.compile(r"<!-- README: (.+) -->")
_BREAK = re.compile(r"(?<=\w)([./_=,:-]+)(?=[\w{])")
_OPTION = re.compile(r"(?<![\w-])--\w")
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and those of the repository's root."""
    os.environ["COLUMNS"] = "100"  # the width of generated help texts
    for path, make in reference.PAGES.items():
        files.append(File.generated(config, path, content=make()))
    for path, name in ROOT_PAGES.items():
        files.append(File.generated(config, path, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put in tables made from the code and the README's sections, check commands, and rewrite links to code."""
    place = page.file.src_uri
    for name, make in reference.TABLES.items():
        markdown = markdown.replace(f"<!-- table: {name} -->", make())
    markdown = _README_SECTION.sub(lambda section: _section_of_readme(section[1]), markdown)
    for problem in commands.problems(markdown, ROOT):
        log.warning("%s: %s", place, problem)
    return _LINK.sub(lambda link: _on_site(link, place), markdown)


def _section_of_readme(title: str) -> str:
    """Return the text of a section of the README, which must have no links to files."""
    text = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition(f"\n## {title}\n")[2]
        .partition("\n## ")[0]
        .strip()
    )
    if not text or _LINK.search(text):
        log.warning("README.md has no section %r without links", title)
    return text


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Let a narrow window break names in code after their points, slashes and underscores, and nowhere else."""

    def breakable(code: str) -> str:
        # Without this a browser breaks an option after its two hyphens.
        return _OPTION.sub(r'<span class="whole">\g<0></span>', _BREAK.sub(r"\1<wbr>", code))

    return _CODE.sub(lambda code: code[1] or f"<code>{breakable(code[2])}</code>", html)


def _on_site(link: re.Match[str], place: str) -> str:
    """Return the link as the site has it: to a page, or in plain words if its target is code."""
    target, anchor = link["target"], link["anchor"] or ""
    if re.match(r"[a-z]+:|/", target):
        return link[0]
    directory = "" if place in ROOT_PAGES else posixpath.join("docs", posixpath.dirname(place))
    in_repository = posixpath.normpath(posixpath.join(directory, target))
    root_pages = {name: path for path, name in ROOT_PAGES.items()} | {"README.md": "index.md"}
    if in_repository in root_pages:
        on_site = root_pages[in_repository]
    elif in_repository == "docs/results":
        on_site = "results/index.md"
    elif in_repository.startswith("docs/"):
        on_site = in_repository.removeprefix("docs/")
    elif (ROOT / in_repository).exists():
        return link["text"] if in_repository in link["text"] else f"{link['text']} (`{in_repository}`)"
    else:
        return link[0]  # for MkDocs to complain about
    return f"[{link['text']}]({posixpath.relpath(on_site, posixpath.dirname(place) or '.')}{anchor})"
