"""Load node, model and workload profiles: those of the package, one YAML file each, or a file of your own.

This is the only loader from YAML to the frozen specs of ``pipemax.domain``. Unknown and missing keys are rejected, and
every message names the file.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.domain.workload import WorkloadSpec

Spec = TypeVar("Spec")


def preset_names(kind: str) -> list[str]:
    """Return the names of the profiles under ``presets/<kind>``: nodes, models or workloads."""
    return sorted(entry.name.removesuffix(".yaml") for entry in files(__name__).joinpath(kind).iterdir())


def read_preset(kind: str, name: str) -> dict[str, Any]:
    """Return the parsed YAML of a shipped profile, or of the file at path ``name`` (ending in .yaml or .yml).

    Raise ``ValueError`` for an unknown name, and if the YAML is not a mapping.
    """
    if name.endswith((".yaml", ".yml")):
        source, text = name, Path(name).read_text(encoding="utf-8")
    else:
        if name not in preset_names(kind):
            raise ValueError(
                f"no {kind[:-1]} profile {name!r}; there are {', '.join(preset_names(kind))}, or give a .yaml file"
            )
        source = f"{kind}/{name}.yaml"
        text = files(__name__).joinpath(kind, f"{name}.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    if not isinstance(values, dict):
        raise ValueError(f"{source}: expected 'name: value' lines, got a {type(values).__name__}")
    return values


def build_spec(spec_type: type[Spec], values: dict[str, Any], where: str) -> Spec:
    """Build a (nested) frozen dataclass from parsed YAML; a field with a default may be left out.

    Raise ``ValueError`` that names a key that is unknown, missing or not a number.
    """
    hints = typing.get_type_hints(spec_type)
    unknown, missing = sorted(values.keys() - hints.keys()), sorted(_required(spec_type) - values.keys())
    if unknown or missing:
        raise ValueError(f"{where}: unknown keys {unknown}, missing keys {missing}")
    converted = {}
    for key, hint in hints.items():
        if key not in values:
            continue
        value = values[key]
        if isinstance(hint, types.UnionType):  # ``int | None``
            if value is None:
                continue
            (hint,) = (one for one in typing.get_args(hint) if one is not types.NoneType)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ValueError(f"{where}: {key} must have keys of its own, got {value!r}")
            value = build_spec(typing.cast(type[Any], hint), value, f"{where}: {key}")
        elif typing.get_origin(hint) is tuple:
            is_of_rows = typing.get_origin(typing.get_args(hint)[0]) is tuple
            value = (_tuple_of_rows if is_of_rows else _tuple_of_integers)(value, f"{where}: {key}")
        elif hint in (int, float):
            try:
                value = hint(value)
            except (TypeError, ValueError):
                raise ValueError(f"{where}: {key} must be a number, got {value!r}") from None
        converted[key] = value
    try:
        return spec_type(**converted)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _required(spec_type: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(spec_type) if field.default is dataclasses.MISSING}


def _tuple_of_rows(value: Any, where: str) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((int(first), int(second)) for first, second in value)
    except (TypeError, ValueError):
        raise ValueError(f"{where} must be rows of two integers, got {value!r}") from None


def _tuple_of_integers(value: Any, where: str) -> tuple[int, ...]:
    try:
        return tuple(int(one) for one in value)
    except (TypeError, ValueError):
        raise ValueError(f"{where} must be a list of integers, got {value!r}") from None


def load_node(name: str) -> NodeSpec:
    """Load a node profile, as ``read_preset`` finds it. Raise ``ValueError`` as ``build_spec`` does."""
    return build_spec(NodeSpec, read_preset("nodes", name), f"node profile {name}")


def load_model(name: str) -> ModelSpec:
    """Load a model profile, as ``read_preset`` finds it. Raise ``ValueError`` as ``build_spec`` does."""
    return build_spec(ModelSpec, read_preset("models", name), f"model profile {name}")


def load_workload(name: str) -> WorkloadSpec:
    """Load a workload profile, as ``read_preset`` finds it. Raise ``ValueError`` as ``build_spec`` does."""
    return build_spec(WorkloadSpec, read_preset("workloads", name), f"workload profile {name}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """What a kind of GPU achieves, for machines without a profile."""

    name: str
    """Part of the name that the driver gives it."""
    hbm_bytes_per_s: float
    flops_per_s: float
    nvlink_bus_bytes_per_s: float
    """Bus bandwidth of an all-reduce over NVLink; 0 for GPUs without."""


def gpu_figures(driver_name: str) -> GpuFigures | None:
    """Return the figures of the GPU that the driver calls so, ``None`` for one that ``gpus.yaml`` does not list."""
    listed = yaml.safe_load(files(__name__).joinpath("gpus.yaml").read_text(encoding="utf-8"))
    figures = next((values for values in listed if _is_part(values["name"], driver_name)), None)
    return None if figures is None else build_spec(GpuFigures, figures, f"gpus.yaml: {driver_name}")


def _is_part(words: str, driver_name: str) -> bool:
    """Tell whether the name holds these words whole: L4 is no part of L40S."""
    return f" {words} " in f" {driver_name} "


def override(spec: Spec, values: Mapping[str, float]) -> Spec:
    """Return a copy with numbers replaced, named by dotted paths: ``{"all_reduce.bus_bytes_per_s": 10e9}``."""
    for path, value in values.items():
        spec = _override_one(spec, path, path.split("."), value)
    return spec


def _override_one(spec: Any, path: str, names: list[str], value: float) -> Any:
    known = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    name, *rest = names
    if name not in known:
        raise ValueError(f"{path}: there is no {name!r}; there are {', '.join(known)}")
    old = known[name]
    if rest:
        if not dataclasses.is_dataclass(old):
            raise ValueError(f"{path}: {name} has no parts")
        new = _override_one(old, path, rest, value)
    elif isinstance(old, int | float):
        new = type(old)(value)
    else:
        raise ValueError(f"{path}: {name} is no number")
    return dataclasses.replace(spec, **{name: new})
