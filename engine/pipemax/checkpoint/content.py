"""Identifies the content that an engine was loaded from, to tell its answers from those of other files of that name.

The config is not enough: a directory's files may be replaced, and a branch on the hub moves on.
"""

import hashlib
import re
from pathlib import Path

from pipemax.checkpoint.fingerprint import fingerprint
from pipemax.config import EngineConfig


def content_of(config: EngineConfig, *, load: int) -> bytes:
    """Return a digest of the model's and the tokenizer's content, as they are now.

    Where the content cannot be known (a hub name without a commit), the digest is that of this ``load`` only.
    """
    known = [_content(name, config.revision) for name in (config.model, config.tokenizer or config.model)]
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
