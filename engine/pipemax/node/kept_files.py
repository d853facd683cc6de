"""Where an engine keeps what it measured on this machine: ``$XDG_CACHE_HOME/pipemax`` (``~/.cache`` by default)."""

import re
from collections.abc import Mapping
from pathlib import Path

CALIBRATIONS = "calibrations"


def kept_directory(environ: Mapping[str, str], name: str) -> Path:
    """Return the directory of one kind of files; it need not exist."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipemax" / name


def kept_name(model: str) -> str:
    """Return what the names of a model's files begin with, before ``--``; ``model`` is a path or a hub name."""
    return re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()).strip("-")
