"""The results of the checks of a node, and where they are kept: next to the calibrations, under keys of their own.

    an engine's check       for this machine with this driver, this model and these versions
    the check of tokens     for this machine with this driver, the model's architecture and these versions

A change of any of them asks for a new one. ``$XDG_CACHE_HOME/pipemax/node-checks`` (``~/.cache`` by default) is a
cache: delete it freely.
"""

import json
import logging
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch

import pipemax
from pipemax.config import EngineConfig
from pipemax.domain.plain_values import decode, encode
from pipemax.vllm_ext.launch.known_calibration import cache_file, device_name, engine_facts, write_cache_file
from pipemax.vllm_ext.seam.vllm_types import VLLM_VERSION, VllmConfig

log = logging.getLogger(__name__)

TOKENS = "tokens"
"""The part that compares tokens across different batches; ``auto`` runs PipeMax without it."""
_DIRECTORY = "node-checks"
_DRIVER = Path("/proc/driver/nvidia/version")


class Verdict(StrEnum):
    """The result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    """Nothing is known to be wrong, and the check could not show that all is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPart:
    """One part of the check."""

    name: str
    verdict: Verdict
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
    def verdict(self) -> Verdict:
        """The worst of the parts: failed before inconclusive before passed."""
        verdicts = {part.verdict for part in self.parts}
        return next(
            (worst for worst in (Verdict.FAILED, Verdict.INCONCLUSIVE) if worst in verdicts), Verdict.PASSED
        )

    def seen(self, verdict: Verdict) -> str:
        """Return the parts with this verdict and what was seen, in one line; empty if there is none."""
        return "; ".join(f"{part.name}: {part.detail}" for part in self.parts if part.verdict is verdict)

    def refusal(self) -> str:
        """Return why PipeMax must not run here; empty if it may."""
        if self.verdict is not Verdict.FAILED:
            return ""
        return f"this machine failed PipeMax's check ({self.seen(Verdict.FAILED)}); `pipemax check-node` repeats it"

    def auto_refusal(self) -> str:
        """Return why ``policy: auto`` must not choose PipeMax here; empty if it may."""
        is_shown = all(part.verdict is not Verdict.INCONCLUSIVE for part in self.parts if part.name != TOKENS)
        return self.refusal() or ("" if is_shown else self.warning())

    def warning(self) -> str:
        """Return what is not known of PipeMax here; empty if the check passed or failed."""
        if self.verdict is not Verdict.INCONCLUSIVE:
            return ""
        seen = self.seen(Verdict.INCONCLUSIVE)
        return f"PipeMax's check of this machine was inconclusive ({seen}); `pipemax check-node` repeats it"

    def joined(self, other: "NodeCheck | None") -> "NodeCheck":
        """Return this check with the parts of another one behind its own."""
        if other is None:
            return self
        return replace(self, parts=self.parts + other.parts, seconds=self.seconds + other.seconds)


def known_check(config: EngineConfig, vllm_config: VllmConfig) -> NodeCheck | None:
    """Return all that is known of this machine under this engine, the check of tokens included."""
    check, tokens = kept_check(config, vllm_config), kept_tokens(vllm_config)
    return tokens if check is None else check.joined(tokens)


def kept_check(config: EngineConfig, vllm_config: VllmConfig) -> NodeCheck | None:
    """Return the check of this machine by this engine, ``None`` if it was never made."""
    return _read(check_path(config, vllm_config))


def kept_tokens(vllm_config: VllmConfig) -> NodeCheck | None:
    """Return the check of tokens on this machine for this architecture, ``None`` if it was never made."""
    return _read(tokens_path(vllm_config))


def keep_check(path: Path, check: NodeCheck) -> Path | None:
    """Keep a check for the next start; return its file. One that cannot be kept only costs a warning."""
    text = json.dumps(encode(check), indent=1) + "\n"
    try:
        write_cache_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))
    except OSError as error:
        log.warning("the check cannot be kept in %s, so the next start does not know of it: %s", path, error)
        return None
    return path


def check_path(config: EngineConfig, vllm_config: VllmConfig) -> Path:
    """Return where the check of this machine under this engine is kept, if it was made."""
    facts = engine_facts(config, vllm_config) | {"pipemax": pipemax.__version__, "driver": _driver()}
    return cache_file(_DIRECTORY, config.model, facts, suffix=".json")


def tokens_path(vllm_config: VllmConfig) -> Path:
    """Return where the check of tokens for this architecture is kept, if it was made."""
    architecture = vllm_config.model_config.architecture
    facts = {
        "architecture": architecture,
        "device": device_name(),
        "driver": _driver(),
        "pipemax": pipemax.__version__,
        "vllm": VLLM_VERSION,
        "torch": torch.__version__,
    }
    return cache_file(_DIRECTORY, f"tokens-{architecture}", facts, suffix=".json")


def _read(path: Path) -> NodeCheck | None:
    try:
        check: NodeCheck = decode(NodeCheck, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("the check of this node in %s cannot be read, and is made again: %s", path, error)
        return None
    return check


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
