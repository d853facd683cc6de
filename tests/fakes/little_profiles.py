"""Profiles of a node and a model for commands that simulate."""

import json
from dataclasses import asdict
from pathlib import Path

import yaml

from pipemax.presets import load_node, read_preset


def little_options(directory: Path) -> list[str]:
    """Write profiles that are simulated in no time, eight GPUs with two of 70B's layers each; return the options."""
    node = json.loads(json.dumps(asdict(load_node("rtx5090x8")))) | {
        "name": "little"
    }  # lists for YAML, not tuples
    node["gpu"]["memory_bytes"] = 6.5e9
    model = read_preset("models", "llama2-70b") | {"name": "little", "num_layers": 16}
    (directory / "node.yaml").write_text(yaml.safe_dump(node))
    (directory / "model.yaml").write_text(yaml.safe_dump(model))
    return ["--node", str(directory / "node.yaml"), "--model", str(directory / "model.yaml")]
