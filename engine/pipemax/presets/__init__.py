"""Load node, model and workload profiles: those of the package, or a YAML file of your own.

Models and workloads have a file each; nodes and GPUs are two tables, ``nodes.yaml`` and ``gpus.yaml``.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from pipemax.domain.specs import ModelSpec
from pipemax.domain.workload import WorkloadSpec
from pipemax.presets.gpus import GpuEntry, driver_gpu, load_gpus
from pipemax.presets.nodes import NodeEntry, load_node, load_nodes, node_entry
from pipemax.presets.yaml_specs import build_spec, override, read_yaml

__all__ = [
    "GpuEntry",
    "NodeEntry",
    "build_spec",
    "driver_gpu",
    "load_gpus",
    "load_model",
    "load_node",
    "load_nodes",
    "load_workload",
    "node_entry",
    "override",
    "preset_names",
    "read_preset",
]


def preset_names(kind: str) -> list[str]:
    """Return the names of the profiles under ``presets/<kind>``: models or workloads."""
    return sorted(entry.name.removesuffix(".yaml") for entry in files(__name__).joinpath(kind).iterdir())


def read_preset(kind: str, name: str) -> dict[str, Any]:
    """Return the parsed YAML of a shipped profile, or of the file at path ``name`` (ending in .yaml or .yml).

    Raise ``ValueError`` for an unknown name, and if the YAML is not a mapping.
    """
    is_file = name.endswith((".yaml", ".yml"))
    if not is_file and name not in preset_names(kind):
        raise ValueError(
            f"no {kind[:-1]} profile {name!r}; there are {', '.join(preset_names(kind))}, or give a .yaml file"
        )
    values = read_yaml(Path(name) if is_file else None, f"{kind}/{name}.yaml")
    if isinstance(values, dict) and "endpoint" in values:
        raise ValueError(
            f"{name} is an engine config with an endpoint, whose server decides how its model runs; give a checkpoint, "
            "or a profile"
        )
    if not isinstance(values, dict):
        raise ValueError(
            f"{name if is_file else f'{kind}/{name}.yaml'}: expected 'name: value' lines, got a {type(values).__name__}"
        )
    return values


def load_model(name: str) -> ModelSpec:
    """Load a model profile, as ``read_preset`` finds it. Raise ``ValueError`` as ``build_spec`` does."""
    return build_spec(ModelSpec, read_preset("models", name), f"model profile {name}")


def load_workload(name: str) -> WorkloadSpec:
    """Load a workload profile, as ``read_preset`` finds it. Raise ``ValueError`` as ``build_spec`` does."""
    return build_spec(WorkloadSpec, read_preset("workloads", name), f"workload profile {name}")
