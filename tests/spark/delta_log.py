"""A Delta table read past Spark: its log, and the files that it holds by it."""

import json
from pathlib import Path
from typing import Any


def actions(table: Path) -> list[dict[str, Any]]:
    """All commits', the oldest first; the log must have no checkpoint yet."""
    commits = sorted((table / "_delta_log").glob("*.json"))
    return [json.loads(line) for commit in commits for line in commit.read_text().splitlines()]


def committed_files(table: Path) -> list[Path]:
    """Of the newest version. A killed writer's files lie next to them."""
    files: set[str] = set()
    for action in actions(table):
        if "add" in action:
            files.add(action["add"]["path"])
        elif "remove" in action:
            files.discard(action["remove"]["path"])
    return [table / file for file in sorted(files)]
