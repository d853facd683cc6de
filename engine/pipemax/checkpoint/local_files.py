"""Finds a model's files on this machine: its directory, or its snapshot in Hugging Face's cache. Downloads nothing.

The cache is read as files (``models--ORG--NAME/refs/REVISION`` names the directory under ``snapshots``), so that no
library of Hugging Face is needed.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Kinds of files with weights. Of a checkpoint that has them twice, vLLM loads the kind that stands first."""


def model_directory(
    model: str, *, revision: str | None = None, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """Return the directory with the files of a path or of a hub name (``org/name``); ``None`` if it is not here."""
    if Path(model).is_dir():
        return Path(model)
    repository = hub_cache(environ) / f"models--{model.replace('/', '--')}"
    named = repository / "refs" / (revision or "main")
    commit = named.read_text(encoding="ascii").strip() if named.is_file() else revision
    snapshot = repository / "snapshots" / (commit or "")
    return snapshot if commit and snapshot.is_dir() else None


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return where Hugging Face's libraries keep downloaded models: ``HF_HUB_CACHE``, ``HF_HOME`` or their default."""
    if "HF_HUB_CACHE" in environ:
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    cache = Path(environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(environ.get("HF_HOME", str(cache))).expanduser() / "hub"


def weight_file_bytes(directory: Path) -> int | None:
    """Return the size of a checkpoint's weights as files; ``None`` if it has none."""
    for pattern in _WEIGHT_FILES:
        sizes = [file.stat().st_size for file in directory.glob(pattern)]
        if sizes:
            return sum(sizes)
    return None
