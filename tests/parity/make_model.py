"""A random model whose greedy output varies enough to tell a wrong KV block from the right one.

Random weights as they are drawn emit two or three distinct tokens, whatever the KV says; scaled up, about forty in
forty-eight.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

_SCALE = {"q_proj": 8.0, "k_proj": 8.0, "v_proj": 6.0, "o_proj": 6.0, "q_b_proj": 8.0, "kv_b_proj": 8.0}
_OTHER_SCALE = 3.0
VOCABULARY = 512


SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""6 million parameters."""
MEDIUM = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
}
"""93 million parameters; 74 kB of KV a token in float32."""


def make_model(directory: Path, shapes: dict[str, int]) -> None:
    """A Llama in float32, and a byte tokenizer."""
    make_tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **shapes,
    )
    model = LlamaForCausalLM(config)
    vary(model)
    model.float().save_pretrained(directory)


def vary(model: PreTrainedModel) -> None:
    """Scale random weights up, so that the output varies."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim in (2, 3) and "embed" not in name and "lm_head" not in name:
                weight.mul_(_SCALE.get(name.split(".")[-2], _OTHER_SCALE))


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["a package, its summary and its description "] * 10, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), SMALL)
