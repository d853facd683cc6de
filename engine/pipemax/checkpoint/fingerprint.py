"""What a checkpoint's content is identified by, wherever it lies."""

import hashlib
from pathlib import Path

_WHOLE_FILE_BYTES = 4 << 20
"""Files up to this size are digested whole; of larger ones, a sample of each part."""
_SAMPLES_OF_LARGE_FILE = 16


def fingerprint(model: str, *, resolved_revision: str | None) -> str:
    """Of a local directory a digest of names, sizes, small files whole and samples of large ones; of a hub name the
    name with the revision that it was resolved to."""
    directory = Path(model)
    if not directory.is_dir():
        return f"{model}@{resolved_revision or 'unknown-revision'}"
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.iterdir() if path.is_file()):
        # Prose beside the weights does not change what they answer.
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
