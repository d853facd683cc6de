"""Reads a checkpoint's ``config.json`` as JSON, for a plan on a machine without transformers.

Values are found by attribute, as in transformers' own configurations, so that the same code reads both. What a file
leaves out is not filled in, except where a family leaves out what all of its checkpoints have in common.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipemax.checkpoint.local_files import model_directory

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
_TIED_FAMILIES = ("gemma", "cohere", "gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "starcoder2", "falcon")
"""Beginnings of model types whose head is the embedding, unless the file says otherwise."""
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "cohere2": {"sliding_window_pattern": 4},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False, "decoder_sparse_step": 1},
    "qwen3": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": {"full_attention_interval": 4},
}
"""What files of a model type may leave out, and what it is then."""


class JsonConfig:
    """The values of a ``config.json``, as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        kind = str(values.get("model_type", ""))
        self._values = dict(_LEFT_OUT.get(kind, {})) | {
            name: value for name, value in values.items() if value is not None
        }
        self._values.setdefault("model_type", kind)
        self._values.setdefault("tie_word_embeddings", kind.startswith(_TIED_FAMILIES))
        self._fill_layer_types()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        return self._values[name]

    def get_text_config(self) -> "JsonConfig":
        """Return the part that describes the decoder of a multimodal model; otherwise all of it."""
        for name in _TEXT_PARTS:
            part = self._values.get(name)
            if isinstance(part, dict):
                outer: dict[str, Any] = {
                    key: self._values[key]
                    for key in ("quantization_config", "tie_word_embeddings")
                    if key in self._values
                }
                return JsonConfig(outer | part).get_text_config()
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the values."""
        return dict(self._values)

    def _fill_layer_types(self) -> None:
        """Say the kind of each layer where the file gives a period only."""
        layers = self._values.get("num_hidden_layers")
        if "layer_types" in self._values or not isinstance(layers, int):
            return
        for name, other in (
            ("sliding_window_pattern", "sliding_attention"),
            ("full_attention_interval", "linear_attention"),
        ):
            period = self._values.get(name)
            if isinstance(period, int) and period > 1:
                self._values["layer_types"] = [
                    other if (layer + 1) % period else "full_attention" for layer in range(layers)
                ]


def config_json_path(model: str) -> Path:
    """Return the ``config.json`` of a directory, of the file itself, or of a hub name whose files are on this machine.

    Raise ``ValueError`` that says how to get it.
    """
    if model.endswith(".json"):
        return Path(model)
    directory = model_directory(model)
    if directory is None:
        raise ValueError(_missing(model))
    return directory / "config.json"


def load_config_json(path: Path) -> JsonConfig:
    """Return the configuration in a file. Raise ``ValueError`` that says what is wrong with it.

    The quantization of a ``hf_quant_config.json`` next to it counts where the file itself gives none.
    """
    values = _read_object(path)
    beside = path.with_name("hf_quant_config.json")
    if "quantization_config" not in values and beside.is_file():
        quantization = _read_object(beside).get("quantization", {})
        values["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return JsonConfig(values)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}: a model is described by its config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values


def _missing(model: str) -> str:
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return (
            f"the config.json of {model!r} is neither in a directory of that name nor in Hugging Face's cache on this "
            f"machine; get it with: hf download {model} config.json"
        )
    return f"there is no model directory {model!r}"
