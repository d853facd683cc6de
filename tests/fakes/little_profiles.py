"""Profiles of a node and a model for commands that simulate."""

from pathlib import Path

import yaml

from pipemax.presets import read_preset


def little_options(directory: Path) -> list[str]:
    """Write profiles that are simulated in no time, eight GPUs with two of 70B's layers each; return the options."""
    node = read_preset("nodes", "rtx5090x8") | {"name": "little"}
    node["gpu"]["memory_bytes"] = 7e9
    model = read_preset("models", "llama2-70b") | {"name": "little", "num_layers": 16}
    (directory / "node.yaml").write_text(yaml.safe_dump(node))
    (directory / "model.yaml").write_text(yaml.safe_dump(model))
    return ["--node", str(directory / "node.yaml"), "--model", str(directory / "model.yaml")]
