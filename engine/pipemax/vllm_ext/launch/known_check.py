"""The result of the check of a node, and where it is kept: next to the calibrations, under a key of its own.

A check holds for this machine with this driver, this model and these versions; a change of any of them asks for a new
one. ``$XDG_CACHE_HOME/pipemax/node-checks`` (``~/.cache`` by default) is a cache: delete it freely.
"""

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from vllm.config import VllmConfig

import pipemax
from pipemax.config import EngineConfig
from pipemax.vllm_ext.launch.known_calibration import cache_file, engine_facts, write_cache_file

log = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPart:
    """One part of the check."""

    name: str
    passed: bool
    detail: str
    """What was seen, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """What was checked on a node, and the verdict."""

    device: str
    model: str
    checked: str
    """Date and versions."""
    seconds: float
    parts: tuple[CheckPart, ...]
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(part.passed for part in self.parts)

    @property
    def failure(self) -> str:
        """The parts that failed and what was seen, in one line; empty if all passed."""
        return "; ".join(f"{part.name}: {part.detail}" for part in self.parts if not part.passed)

    def refusal(self) -> str:
        """Why PipeMax must not run here."""
        return f"this machine failed PipeMax's check ({self.failure}); `pipemax check-node` repeats it"

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Self:
        return cls(**{**values, "parts": tuple(CheckPart(**part) for part in values["parts"])})


def kept_check(config: EngineConfig, vllm_config: VllmConfig) -> NodeCheck | None:
    """Return what is known of this machine under this engine, ``None`` if it was never checked."""
    path = check_path(config, vllm_config)
    try:
        return NodeCheck.from_values(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("the check of this node in %s cannot be read, and is made again: %s", path, error)
        return None


def keep_check(config: EngineConfig, vllm_config: VllmConfig, check: NodeCheck) -> Path | None:
    """Keep the check for the next start; return its file. One that cannot be kept only costs a warning."""
    path = check_path(config, vllm_config)
    text = json.dumps(asdict(check), indent=1) + "\n"
    try:
        write_cache_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))
    except OSError as error:
        log.warning("the check cannot be kept in %s, so the next start checks again: %s", path, error)
        return None
    return path


def check_path(config: EngineConfig, vllm_config: VllmConfig) -> Path:
    """Return where the check of this machine under this engine is kept, if it was made."""
    facts = engine_facts(config, vllm_config) | {"pipemax": pipemax.__version__, "driver": _driver()}
    return cache_file("node-checks", config, facts, suffix=".json")


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
