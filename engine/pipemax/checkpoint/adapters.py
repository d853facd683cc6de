"""Reads LoRA adapters' directories, without weights and without vLLM."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pipemax.checkpoint.fingerprint import fingerprint
from pipemax.config import EngineConfig

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks that vLLM has kernels for."""


def check_adapters(config: EngineConfig) -> None:
    """Raise ``ValueError`` for an adapter that vLLM could not load."""
    max_rank(config)
    for name, directory in config.lora.items():
        if not any((Path(directory) / file).is_file() for file in _WEIGHTS):
            raise ValueError(
                f"adapter {name!r}: {directory!r} holds no weights ({', '.join(_WEIGHTS)}): complete the adapter"
            )


def max_rank(config: EngineConfig) -> int:
    """Return the rank that vLLM must make room for: the largest of all adapters, rounded up to one of vLLM's."""
    largest = max((_rank(name, directory) for name, directory in config.lora.items()), default=1)
    fitting = [rank for rank in _RANKS if rank >= largest]
    if not fitting:
        raise ValueError(f"an adapter has rank {largest}; vLLM takes at most {_RANKS[-1]}")
    return fitting[0]


def _rank(name: str, directory: str) -> int:
    file = Path(directory) / "adapter_config.json"
    try:
        rank = json.loads(file.read_bytes())["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"adapter {name!r}: {str(file)!r} cannot be read, or gives no rank (r): {error!r}; give the directory of a "
            "LoRA adapter in PEFT's format"
        ) from error
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"adapter {name!r}: the rank (r) in {str(file)!r} is {rank!r}")
    return rank


def unknown_adapter(name: str, known: Sequence[str]) -> str:
    """Say that the engine config names no such adapter."""
    named = f"the engine config names {', '.join(known)}" if known else "the engine config names none (lora:)"
    return f"there is no adapter {name!r}: {named}"


def with_adapters(content: str, config: EngineConfig) -> str:
    """Return what identifies a model of this content together with the config's adapters."""
    if not config.lora:
        return content
    digest = hashlib.sha256(content.encode())
    for name, directory in sorted(config.lora.items()):
        digest.update(f"\0{name}\0{fingerprint(directory, resolved_revision=None)}".encode())
    return f"{content}+lora:{digest.hexdigest()[:16]}"
