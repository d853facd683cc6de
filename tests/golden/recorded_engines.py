"""Engine configs of every kind, as YAML, and what each was read as."""

import json
from pathlib import Path
from typing import Any

import yaml

from pipemax.config import EngineConfig

RECORDED = Path(__file__).parent / "engines.json"
_FACTS = ("num_replicas", "tensor_degree", "frees_windows", "is_pooling")


def recorded_engines() -> dict[str, dict[str, Any]]:
    """Return by the config's name: its ``yaml``, the ``fields`` that it was read as and the ``facts`` that follow."""
    engines: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return engines


def facts_of(text: str) -> dict[str, Any]:
    """Return what a config is read as now."""
    config = EngineConfig.parse(yaml.safe_load(text))
    return {
        "fields": config.model_dump(mode="json"),
        "facts": {name: getattr(config, name) for name in _FACTS},
    }
