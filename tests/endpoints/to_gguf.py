"""Convert the demo model into a GGUF file for llama.cpp: ``python -m tests.endpoints.to_gguf MODEL FILE``.

It needs numpy and the gguf package (``tools/make_llama.sh``), not torch. The values stay exact: bfloat16 is written as
float32. One thing differs: of several blanks before a word, llama.cpp's nearest splitter gives the word the last one,
and the demo model's does not. Only plain Llama checkpoints with a byte-level BPE tokenizer are known here.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# llama.cpp's splitter with the demo tokenizer's expression, plus an alternative `\s+(?!\S)` before the last one.
PRE_TOKENIZER = "ufakzeka"


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Return a safetensors file's bfloat16 arrays as float32, by name."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        first, end = entry["data_offsets"]
        halves = np.frombuffer(content[begin + first : begin + end], np.uint16)
        arrays[name] = (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return arrays


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a query's or key's rows in llama.cpp's order: its rotation takes neighbours, Hugging Face's halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[name] for name in names] == [*range(config["vocab_size"])], "ids with holes"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(names)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if name in special else gguf.TokenType.NORMAL for name in names]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((model / "chat_template.jinja").read_text(encoding="utf-8"))


def convert(model: Path, file: Path) -> None:
    """Write the GGUF file of a model directory."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"], f"{model} is no plain Llama"
    writer = gguf.GGUFWriter(str(file), "llama")
    add_settings(writer, config)
    add_tokenizer(writer, model, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, array in tensors(model / "model.safetensors").items():
        count = next((number for part, number in heads.items() if part in name), None)
        in_order = array if count is None else interleaved(array, count)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), in_order)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
