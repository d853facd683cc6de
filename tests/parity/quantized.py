"""A checkpoint's linear layers with weights of four bits, as AWQ and GPTQ store them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_GROUP = 32
"""Inputs that share a scale."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs that AWQ packs into one word, from the lowest bits on."""
_PER_WORD = 8
_ZERO = 8


def quantize(directory: Path, method: str) -> None:
    """Replace the weights of a checkpoint in one file by those of ``awq`` or ``gptq``."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    packed: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            packed |= {stem + part: value for part, value in _pack(weight, method).items()}
        else:
            packed[name] = weight
    save_file(packed, file, metadata={"format": "pt"})
    settings = {"quant_method": method, "bits": 4, "group_size": _GROUP}
    settings |= (
        {"zero_point": True, "version": "gemm"} if method == "awq" else {"desc_act": False, "sym": True}
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def _pack(weight: torch.Tensor, method: str) -> dict[str, torch.Tensor]:
    """``weight``: ``(outputs, inputs)``."""
    inputs, outputs = weight.shape[1], weight.shape[0]
    groups = weight.T.reshape(inputs // _GROUP, _GROUP, outputs)
    scales = groups.abs().amax(dim=1) / (_ZERO - 1)
    levels = (groups / scales[:, None]).round().clamp(-_ZERO, _ZERO - 1) + _ZERO
    values = levels.reshape(inputs, outputs).to(torch.int64)
    zeros = torch.full((inputs // _GROUP, outputs), _ZERO, dtype=torch.int64)
    if method == "awq":
        return {"qweight": _awq_words(values), "qzeros": _awq_words(zeros), "scales": scales.half()}
    by_input = values.T.reshape(outputs, inputs // _PER_WORD, _PER_WORD)
    of_output = (zeros - 1).reshape(-1, outputs // _PER_WORD, _PER_WORD)  # GPTQ stores a zero point less one
    return {
        "qweight": _words(by_input).T.contiguous(),
        "qzeros": _words(of_output),
        "scales": scales.half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // _GROUP,
    }


def _awq_words(values: torch.Tensor) -> torch.Tensor:
    """``values``: ``(rows, outputs)``."""
    rows, outputs = values.shape
    return _words(values.reshape(rows, outputs // _PER_WORD, _PER_WORD)[:, :, list(_AWQ_ORDER)])


def _words(nibbles: torch.Tensor) -> torch.Tensor:
    """Pack the last dimension's eight values of four bits, the first in the lowest bits."""
    shifts = torch.arange(_PER_WORD) * 4
    words = (nibbles << shifts).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()
