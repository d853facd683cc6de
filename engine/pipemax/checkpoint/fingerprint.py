"""Identifies a checkpoint's content, wherever it is stored."""

import hashlib
import json
import re
from pathlib import Path

from pipemax.endpoint_config import AnyConfig, EndpointConfig

_WHOLE_FILE_BYTES = 4 << 20
"""Files up to this size are digested whole; of larger files, a sample of each part is digested."""
_SAMPLES_OF_LARGE_FILE = 16
_TEXTS_FOR_PEOPLE = re.compile(r".*\.md|(licen[cs]e|notice|readme|requirements|use_policy).*", re.IGNORECASE)
"""Files that do not change the model's answers. Other text files do: vocab.txt and merges.txt are tokenizers."""


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
        if _TEXTS_FOR_PEOPLE.fullmatch(file.name) or file.name.startswith("."):
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


def content_of(config: AnyConfig, *, load: int) -> bytes:
    """Return a digest of the content of model, tokenizer and adapters, as they are now.

    It tells an engine's answers from those of an engine that was loaded from other files of the same name. The config
    is not enough: a directory's files may be replaced, and a branch on the hub moves on.

    An endpoint's is what the check before the job has found it to serve.

    Where the content cannot be known (a hub name without a commit), the digest is that of this ``load`` only.
    """
    if isinstance(config, EndpointConfig):
        return hashlib.blake2b(served_model(config).encode(), digest_size=16).digest()
    named = (
        config.model,
        config.tokenizer or config.model,
        *(path for _, path in sorted(config.lora.items())),
    )
    known = [_content(name, config.revision) for name in named]
    text = "\n".join(content or f"load {load}" for content in known)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _content(name: str, revision: str | None) -> str | None:
    if Path(name).is_dir():
        try:
            return fingerprint(name, resolved_revision=None)
        except OSError:  # a file was replaced while it was read
            return None
    is_commit = re.fullmatch(r"[0-9a-f]{40}", revision or "")
    return f"{name}@{revision}" if is_commit else None


def served_model(config: EndpointConfig) -> str:
    """Return what is known of the model that an endpoint serves, for a job's spec: never its URL."""
    known = {
        "model": config.model,
        "revision": config.model_revision,
        "serves": [] if config.server is None else list(config.server.models),
    }
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return f"endpoint:{digest[:32]}"
