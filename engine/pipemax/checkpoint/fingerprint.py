"""Identifies a checkpoint's content, wherever it is stored."""

import hashlib
from pathlib import Path

_WHOLE_FILE_BYTES = 4 << 20
"""Files up to this size are digested whole; of larger files, a sample of each part is digested."""
_SAMPLES_OF_LARGE_FILE = 16


def fingerprint(model: str, *, resolved_revision: str | None) -> str:
    """Return a string that changes when the model's content changes.

    For a local directory, this is a digest of names, sizes, whole small files and samples of large ones; for a hub
    name, the name with the revision that it was resolved to.
    """
    directory = Path(model)
    if not directory.is_dir():
        return f"{model}@{resolved_revision or 'unknown-revision'}"
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.iterdir() if path.is_file()):
        # Text files next to the weights do not change the model's answers.
        if file.suffix.lower() in (".md", ".txt") or file.name.startswith("."):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(stream.read())
                continue
            for sample in range(_SAMPLES_OF_LARGE_FILE):
                stream.seek(sample * (size // _SAMPLES_OF_LARGE_FILE))
                digest.update(stream.read(_WHOLE_FILE_BYTES // _SAMPLES_OF_LARGE_FILE))
    return f"sha256:{digest.hexdigest()[:32]}"
