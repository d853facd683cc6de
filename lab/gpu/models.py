"""Model directories and engine configs of the runs on one GPU. Nothing is downloaded: weights are random or dummies."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "model"
STAGE_LAYERS = 10
STAGE_BLOCKS = 17_753
"""KV blocks of 16 tokens, 640 KiB each, 11.6 GB: what one of eight 32 GB cards holds of LLaMA-2-70B's."""
BLOCK_TOKENS = 16
MAX_MODEL_LEN = 2048

KERNELS = {"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False, "enable_jit_warmup": False}
"""vLLM's warm-ups, which take a minute and change no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Of a Llama with dummy weights."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int = 8
    vocabulary: int = 32000

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, with heads of 128 values in bfloat16."""
        return 2 * 2 * 128 * self.kv_heads * self.layers


STAGE_OF_EIGHT = Shapes(hidden=8192, feed_forward=28672, layers=STAGE_LAYERS, heads=64)
"""Ten layers of LLaMA-2-70B."""
STAGE_OF_TWO = Shapes(hidden=5120, feed_forward=25600, layers=32, heads=64)
"""Half of Qwen3-32B: 31 GB of weights."""
ONE_GPU = Shapes(hidden=4096, feed_forward=14336, layers=32, heads=32, vocabulary=128256)
"""Llama-3.1-8B: 16 GB of weights."""


def graphs(*sizes: int, are_piecewise: bool = False) -> dict[str, Any]:
    """Return vLLM's compilation config: CUDA graphs of decode batches of these sizes, without minutes of compiling.

    ``are_piecewise``: of steps with prompt tokens too, which has vLLM break the graphs at attention
    (``VLLM_USE_BREAKABLE_CUDAGRAPH``).
    """
    mode = "FULL_AND_PIECEWISE" if are_piecewise else "FULL_DECODE_ONLY"
    return {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": list(sizes)}


def make_stage_model(directory: Path, shapes: Shapes = STAGE_OF_EIGHT) -> None:
    """Write the configuration of a Llama of these shapes, and the demo model's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.feed_forward,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
        "vocab_size": shapes.vocabulary,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    shutil.copy(TOKENIZER / "tokenizer.json", directory)
    # The tokenizer's own limit is the demo model's: vLLM would refuse longer prompts by it.
    tokenizer = json.loads((TOKENIZER / "tokenizer_config.json").read_text(encoding="utf-8"))
    limits = {"model_max_length": 32768}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer | limits) + "\n", encoding="utf-8")


def stage_config(
    model: Path, shapes: Shapes = STAGE_OF_EIGHT, *, kv_blocks: int = STAGE_BLOCKS, **fields: Any
) -> dict[str, Any]:
    """Return the fields of an engine config for a stage with so many blocks of KV; ``fields`` come on top."""
    sizes = (1, 2, 4, *range(8, 104, 8), *range(112, 272, 16), 320, 384, 448, 512)
    return {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK_TOKENS,
        "gpu_memory_utilization": 0.85,
        "chat": "never",
        "enable_prefix_caching": False,
        "pipeline_parallel_size": 1,
        "vllm": {
            "load_format": "dummy",
            "kv_cache_memory_bytes": kv_blocks * BLOCK_TOKENS * shapes.kv_bytes_per_token,
            "attention_backend": "FLASH_ATTN",
            "kernel_config": KERNELS,
            "compilation_config": graphs(*sizes, are_piecewise=True),
        },
        **fields,
    }


def make_check_engine(directory: Path) -> Path:
    """Write an engine config for ``pipemax check-node``, and its model. Return the config's file."""
    model = directory / "check-node-model"
    make_stage_model(model)
    config = stage_config(
        model, kv_blocks=6000, policy="pipemax", num_batches=3, host_kv_gib=8, max_num_seqs=256
    )
    path = directory / "check-node.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path
