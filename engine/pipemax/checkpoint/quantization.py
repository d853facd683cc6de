"""Reads from a checkpoint's configuration how many bytes its weights have, and in which type they are multiplied.

The names are those of the tools that write such configurations: Hugging Face's, compressed-tensors (llm-compressor),
ModelOpt. Which modules stay as they were is asked for one layer in the middle of the model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipemax.domain.hardware import WeightDtype

_SCALE_BYTES = 2
_MX_BYTES, _NVFP4_BYTES = 0.5 + 1 / 32, 0.5 + 1 / 16
"""Of a weight, with a scale of eight bits for 32 weights, or for 16."""
_ATTENTION = ("self_attn.q_proj", "self_attn.o_proj")
_EXPERTS = ("mlp.experts.0.up_proj", "mlp.experts", "mlp.up_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeights:
    """Quantized weights, and the parts of a layer that have them."""

    value_bytes: float
    """Bytes of a weight, scales included."""
    dtype: WeightDtype
    """In which their products are computed: BF16 where they are unpacked for it."""
    has_attention: bool
    has_experts: bool
    """The feed-forward part, also of a dense model."""


def quantized_weights(quantization: object, num_layers: int) -> QuantizedWeights | None:
    """Return what ``quantization_config`` says; ``None`` without one.

    Raise ``ValueError`` that names the key whose value is not known.
    """
    if quantization is None:
        return None
    settings: dict[str, Any] = quantization if isinstance(quantization, dict) else vars(quantization)
    value_bytes, dtype = _weights(settings)
    left_out = [
        str(name)
        for key in (
            "modules_to_not_convert",
            "ignore",
            "ignored_layers",
            "exclude_modules",
            "llm_int8_skip_modules",
        )
        for name in settings.get(key) or ()
    ]
    layer = f"model.layers.{num_layers // 2}."
    only_experts = settings.get("quant_method") == "mxfp4"
    return QuantizedWeights(
        value_bytes=value_bytes,
        dtype=dtype,
        has_attention=not only_experts and not _is_left_out(layer, _ATTENTION, left_out),
        has_experts=not _is_left_out(layer, _EXPERTS, left_out),
    )


def _weights(settings: Mapping[str, Any]) -> tuple[float, WeightDtype]:
    """Return the bytes of a weight and the type of its products."""
    method = settings.get("quant_method")
    match method:
        case "mxfp4":
            return _MX_BYTES, WeightDtype.BF16
        case "fp8" | "fbgemm_fp8":
            return 1.0, WeightDtype.FP8
        case "gptq" | "awq" | "auto-round" | "gptq_marlin" | "awq_marlin" if isinstance(
            settings.get("bits"), int
        ):
            return _grouped(settings["bits"], settings.get("group_size"), has_zeros=True), WeightDtype.BF16
        case "bitsandbytes":
            return (0.5 + 4 / 64 if settings.get("load_in_4bit") else 1.0), WeightDtype.BF16
        case "modelopt" | "modelopt_fp4":
            return _modelopt(settings)
        case "compressed-tensors":
            return _compressed_tensors(settings)
    raise ValueError(
        f"the bytes of weights quantized by {method!r} are not known (quantization_config.quant_method)"
    )


def _grouped(bits: int, group_size: object, *, has_zeros: bool) -> float:
    """Return the bytes of a weight with its part of a group's scale and zero point; one group may be a whole row."""
    if not isinstance(group_size, int) or group_size < 1:
        return bits / 8
    return bits / 8 + (_SCALE_BYTES + (bits / 8 if has_zeros else 0)) / group_size


def _modelopt(settings: Mapping[str, Any]) -> tuple[float, WeightDtype]:
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm.startswith("FP8"):
        return 1.0, WeightDtype.FP8
    if "NVFP4" in algorithm:
        return _NVFP4_BYTES, WeightDtype.FP4
    if "W4A16" in algorithm:
        return _grouped(4, settings.get("group_size") or 128, has_zeros=False), WeightDtype.BF16
    raise ValueError(f"the bytes of ModelOpt's {settings.get('quant_algo')!r} are not known (quant_algo)")


def _compressed_tensors(settings: Mapping[str, Any]) -> tuple[float, WeightDtype]:
    """Return those of the groups of modules, which must be the same in all."""
    kinds = set()
    for group in (settings.get("config_groups") or {}).values():
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        bits, is_float = weights.get("num_bits"), weights.get("type") == "float"
        if not isinstance(bits, int):
            continue
        if is_float and bits == 4:
            is_mx = "mx" in str(group.get("format") or settings.get("format"))
            kinds.add((_MX_BYTES if is_mx else _NVFP4_BYTES, WeightDtype.FP4 if inputs else WeightDtype.BF16))
        elif bits == 8:
            kinds.add((1.0, WeightDtype.FP8 if is_float and inputs else WeightDtype.BF16))
        else:
            kinds.add((_grouped(bits, weights.get("group_size"), has_zeros=False), WeightDtype.BF16))
    if len(kinds) != 1:
        raise ValueError(
            "the bytes of weights quantized by 'compressed-tensors' are not known: quantization_config.config_groups "
            f"has {len(kinds)} kinds of weights"
        )
    return kinds.pop()


def _is_left_out(layer: str, modules: tuple[str, ...], patterns: list[str]) -> bool:
    """Tell whether one of these modules of a layer is left unquantized."""
    names = [layer + module for module in modules]
    return any(_matches(name, pattern) for name in names for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a pattern names a module: a regular expression after ``re:``, with ``*``, or a part of the name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatchcase(name, f"{pattern}*") or fnmatchcase(name, f"*.{pattern}*")
    return f".{pattern}." in f".{name}."
