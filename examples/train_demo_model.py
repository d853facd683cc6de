"""Train the demo model from scratch on a CPU: a small Llama that names a Debian package's archive section.

Makes a byte-level BPE tokenizer with a chat template and a LlamaForCausalLM checkpoint that answers
`{"section": "..."}`, measures its greedy accuracy on the held-out table, and writes the model card. Prompts are
rendered by the tokenizer's own chat template, in training as in serving.

Three things make minutes on a CPU enough. The token embeddings start as those of a bag-of-tokens classifier, trained
first on the same rows (fastText's model: Joulin et al., 2016). Only the answer is learned, so the last layer, where
no later token looks back, is computed at the answer's positions alone. And descriptions are often cut short.

Some training sources are set aside as a validation part. The held-out table is read once, after the last step. The
script knows nothing of vLLM and makes no model of general use.

Run, after build_demo_table.py: OMP_WAIT_POLICY=PASSIVE python examples/train_demo_model.py
(passive, since OpenMP threads that spin at barriers starve each other when anything else uses the cores).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

EXAMPLES = Path(__file__).resolve().parent
PROMPT_TEMPLATE = "Package: {package}\nSummary: {summary}\nDescription: {description}"
BEGIN, END, PAD, ASSISTANT = "<|begin|>", "<|end|>", "<|pad|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# A sign or space goes with the letters after it, so that a name falls apart into "lib..", "-dev", "-doc"; digits
# stand alone.
WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
CONTEXT_TOKENS = 1024
VALIDATION_SHARE = 0.04  # of the training sources
IGNORED = -100  # a position without a target

Row = dict[str, str]
Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One rendered and tokenized chat, answer included."""

    token_ids: list[int]
    answer_start: int  # index of the first token after <|assistant|>


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded examples; causal attention never looks at the padding, so there is no mask."""

    token_ids: Tensor  # (rows, tokens)
    positions: Tensor  # (rows, answer tokens): where the answer's tokens are predicted
    targets: Tensor  # (rows, answer tokens): those tokens, else IGNORED
    prompt_lengths: Tensor  # (rows, 1)


def read_rows(path: Path) -> list[Row]:
    """All rows of one table as {column: value}."""
    return pq.read_table(path).to_pylist()


def is_validation_source(source: str) -> bool:
    """Whether a source package's rows are set aside; siblings stay together."""
    digest = hashlib.sha256(f"validation/{source}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def answer_text(section: str) -> str:
    """Return the answer as schema-constrained decoding spells it too."""
    return json.dumps({"section": section})


def user_message(row: Row) -> Message:
    """Return the user's turn for one row."""
    return {"role": "user", "content": PROMPT_TEMPLATE.format(**row)}


def train_tokenizer(rows: list[Row], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE on prompts and answers."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, PAD, "<|system|>", "<|user|>", ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Rare sections' names are repeated until they are frequent enough to become one token each.
    answers = 300 * [answer_text(section) for section in sorted({row["section"] for row in rows})]
    bpe.train_from_iterator([*(PROMPT_TEMPLATE.format(**row) for row in rows), *answers], trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, intermediate_size: int, num_layers: int
) -> LlamaForCausalLM:
    """Return a freshly initialised Llama with heads of 32 and two query heads to a key-value head."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def cut_description(description: str, rng: random.Random) -> str:
    """Keep all of it or, half the time, a beginning of at most 100 characters, so that steps are cheap."""
    limit = rng.randint(0, 100) if rng.random() < 0.5 else len(description)
    return description[:limit].rpartition(" ")[0] if limit < len(description) else description


def encode_examples(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> list[Example]:
    """Render every row and its answer through the chat template; tokenize."""
    chats = [
        [user_message(row), {"role": "assistant", "content": answer_text(row["section"])}] for row in rows
    ]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    token_lists = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assistant_id = tokenizer.convert_tokens_to_ids(ASSISTANT)
    return [
        Example(token_ids=token_ids, answer_start=token_ids.index(assistant_id) + 1)
        for token_ids in token_lists
    ]


def collate(examples: list[Example], pad_id: int) -> Batch:
    """Pad to the longest example; lay out where the answer's tokens are predicted."""
    width = max(len(example.token_ids) for example in examples)
    answer_width = max(len(example.token_ids) - example.answer_start for example in examples)
    token_ids = torch.tensor(
        [example.token_ids + [pad_id] * (width - len(example.token_ids)) for example in examples]
    )
    lengths = torch.tensor([[len(example.token_ids)] for example in examples])
    starts = torch.tensor([[example.answer_start] for example in examples])
    target_positions = starts + torch.arange(answer_width)
    within = target_positions < lengths
    target_positions = target_positions.minimum(lengths - 1)
    return Batch(
        token_ids=token_ids,
        positions=target_positions - 1,
        targets=token_ids.gather(1, target_positions).where(within, IGNORED),
        prompt_lengths=starts,
    )


def make_batches(
    examples: list[Example], pad_id: int, tokens_per_batch: int, rng: random.Random
) -> Iterator[Batch]:
    """Batches of examples of like length, shuffled, each at most `tokens_per_batch` with its padding."""
    # The random term breaks up runs of equal length, so that a batch is not the same company every epoch.
    ordered = sorted(examples, key=lambda example: len(example.token_ids) + rng.random() * 4)
    groups: list[list[Example]] = [[]]
    width = 0
    for example in ordered:
        width = max(width, len(example.token_ids))
        if width * (len(groups[-1]) + 1) > tokens_per_batch:
            groups.append([])
            width = len(example.token_ids)
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        yield collate(group, pad_id)


def warm_start_embeddings(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row], rng: random.Random
) -> None:
    """Set the token embeddings to those of a bag-of-tokens section classifier, scaled to a deviation of 0.1."""
    sections = sorted({row["section"] for row in rows})
    texts = [
        PROMPT_TEMPLATE.format(**{**row, "description": cut_description(row["description"], rng)})
        for row in rows
    ]
    token_lists = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bag = torch.nn.EmbeddingBag(len(tokenizer), model.config.hidden_size, mode="mean")
    torch.nn.init.normal_(bag.weight, std=0.02)
    head = torch.nn.Linear(model.config.hidden_size, len(sections))
    optimizer = torch.optim.Adam([*bag.parameters(), *head.parameters()], lr=5e-3, fused=True)
    # Two passes: more of them learn the training rows by heart and little that carries over.
    order = torch.cat([torch.randperm(len(rows)) for _ in range(2)])
    for indices in order.split(128):
        bags = [torch.tensor(token_lists[index]) for index in indices]
        offsets = torch.tensor([0, *map(len, bags[:-1])]).cumsum(0)
        targets = torch.tensor([sections.index(rows[index]["section"]) for index in indices])
        loss = functional.cross_entropy(head(bag(torch.cat(bags), offsets)), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(bag.weight * (0.1 / bag.weight.std()))


def last_layer(
    layer: LlamaDecoderLayer, hidden: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor
) -> Tensor:
    """Compute the decoder layer's output only at `positions` (rows, answer tokens)."""
    attention = layer.self_attn
    rows, tokens, width = hidden.shape
    heads = (rows, -1, attention.head_dim)
    normed = layer.input_layernorm(hidden)
    at_positions = positions[..., None].expand(-1, -1, width)
    queries = attention.q_proj(normed.gather(1, at_positions)).unflatten(-1, heads[1:]).transpose(1, 2)
    keys = attention.k_proj(normed).unflatten(-1, heads[1:]).transpose(1, 2)
    values = attention.v_proj(normed).unflatten(-1, heads[1:]).transpose(1, 2)
    cosine, sine = rotary
    queries, _ = apply_rotary_pos_emb(queries, queries, cosine[0][positions], sine[0][positions])
    keys, _ = apply_rotary_pos_emb(keys, keys, cosine, sine)
    is_seen = torch.arange(tokens) <= positions[:, None, :, None]  # (rows, 1, answer tokens, tokens)
    mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen, enable_gqa=True)
    residual = hidden.gather(1, at_positions) + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return residual + layer.mlp(layer.post_attention_layernorm(residual))


def answer_logits(model: LlamaForCausalLM, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Compute the logits (rows, answer tokens, vocabulary) that the model's own forward has at `positions`."""
    decoder = model.model
    # The plain kernel: at these lengths, the fused one's backward pass is several times slower.
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        hidden = decoder.embed_tokens(token_ids)
        rotary = decoder.rotary_emb(hidden, torch.arange(token_ids.shape[1])[None])
        for layer in decoder.layers[:-1]:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        hidden = last_layer(decoder.layers[-1], hidden, rotary, positions)
        return model.lm_head(decoder.norm(hidden)).float()


def make_optimizer(model: LlamaForCausalLM, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone; the learning rate is set before every step."""
    groups = [
        {"params": [each for each in model.parameters() if each.ndim >= 2], "weight_decay": weight_decay},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


@torch.inference_mode()
def share_right(model: LlamaForCausalLM, batches: list[Batch]) -> float:
    """Share of rows that greedy decoding would answer to the letter: every answer token is the likeliest one."""
    num_right = num_rows = 0
    for batch in batches:
        likeliest = answer_logits(model, batch.token_ids, batch.positions).argmax(-1)
        is_right = (likeliest == batch.targets) | (batch.targets == IGNORED)
        num_right += int(is_right.all(1).sum())
        num_rows += len(is_right)
    return num_right / num_rows


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    validation_rows: list[Row],
    arguments: argparse.Namespace,
) -> float:
    """Train in place, the learning rate up over 4 % of the run and down as a cosine; the validation accuracy."""
    rng = random.Random(arguments.seed)
    pad_id = tokenizer.pad_token_id
    warm_start_embeddings(model, tokenizer, rows, rng)
    validation = list(
        make_batches(encode_examples(tokenizer, validation_rows), pad_id, arguments.tokens_per_batch, rng)
    )
    optimizer = make_optimizer(model, arguments.weight_decay)
    started_s = time.monotonic()
    accuracy = 0.0
    num_tokens = 0
    for epoch in range(arguments.epochs):
        cut_rows = [{**row, "description": cut_description(row["description"], rng)} for row in rows]
        examples = encode_examples(tokenizer, cut_rows)
        batches = list(make_batches(examples, pad_id, arguments.tokens_per_batch, rng))
        losses: list[float] = []
        for step, batch in enumerate(batches, start=1):
            progress = (epoch + step / len(batches)) / arguments.epochs
            scale = min(progress / 0.04, 0.5 + 0.5 * math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * scale
            # Hidden tokens keep the model from leaning on any one, such as a name that no other source has.
            is_hidden = torch.rand(batch.token_ids.shape) < arguments.hidden_share
            is_hidden &= torch.arange(batch.token_ids.shape[1]) < batch.prompt_lengths - 1
            logits = answer_logits(model, batch.token_ids.masked_fill(is_hidden, pad_id), batch.positions)
            loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
            loss = loss / len(batch.token_ids)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            num_tokens += batch.token_ids.numel()
            losses.append(loss.item())
            if step % 100 == 0:
                elapsed_s = time.monotonic() - started_s
                print(
                    f"{progress:6.1%} {elapsed_s:6.0f} s  loss {sum(losses[-100:]) / 100:.3f} nats a row  "
                    f"{num_tokens / elapsed_s:,.0f} tokens/s",
                    flush=True,
                )
        accuracy = share_right(model, validation)
        print(f"epoch {epoch + 1}: validation {accuracy:.2%}", flush=True)
    return accuracy


@torch.inference_mode()
def generate_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row], batch_rows: int = 64
) -> list[str]:
    """Greedy answers without the end-of-turn token, in the rows' order."""
    tokenizer.padding_side = "left"
    answers: list[str] = []
    for start in range(0, len(rows), batch_rows):
        prompts = tokenizer.apply_chat_template(
            [[user_message(row)] for row in rows[start : start + batch_rows]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        chats = model.generate(**prompts, max_new_tokens=24, do_sample=False)
        answer_ids = chats[:, prompts["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(answer_ids, skip_special_tokens=True)
    return answers


CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# Debian sections, a demo model

A small Llama trained from scratch that answers a Debian package's name and descriptions with its archive section as
JSON, such as `{example}`. It exists so that an offline-inference pipeline can be run and tested end to end on
a laptop, and can do nothing else: one task, one prompt, in English. Licence: Apache-2.0.

## Measured

{figures}

Greedy decoding of the bfloat16 checkpoint as saved, in float32, with Hugging Face `generate` and no constraint on the
output. The tables are split by source package; near-duplicates across sources are not looked for.

## How it was made

By `train_demo_model.py` on {num_rows:,} rows; {num_validation:,} more, of other source packages, were set aside
as the validation part. {epochs} epochs, batches of up to {tokens_per_batch:,} tokens, AdamW, learning rate
{learning_rate:g} at its peak, weight decay {weight_decay:g}, {hidden_share:.0%} of the prompt's tokens hidden,
seed {seed}. LlamaForCausalLM: {layers} layers, hidden size {hidden_size}, {heads} heads with {key_value_heads}
key-value heads of {head_dim}, MLPs of {intermediate_size}, tied embeddings, {vocab_size:,} byte-level BPE tokens,
context {context:,}.

The user's message is exactly this, with real newlines:

```
{template}
```

## By section

| section | training rows | held-out rows | exact match |
|---|---:|---:|---:|
{by_section}
"""


def write_model_card(
    path: Path,
    *,
    model: LlamaForCausalLM,
    arguments: argparse.Namespace,
    train_rows: list[Row],
    num_validation: int,
    test_rows: list[Row],
    answers: list[str],
    validation_accuracy: float,
    train_s: float,
) -> None:
    """Write the card with the figures measured in this run, and print the headline ones."""
    correct = [answer == answer_text(row["section"]) for row, answer in zip(test_rows, answers, strict=True)]
    known = {answer_text(row["section"]) for row in train_rows}
    in_train, in_test = (Counter(row["section"] for row in rows) for rows in (train_rows, test_rows))
    right = Counter(row["section"] for row, is_right in zip(test_rows, correct, strict=True) if is_right)
    majority, _ = in_train.most_common(1)[0]
    accuracy, majority_share = sum(correct) / len(test_rows), in_test[majority] / len(test_rows)
    figures = (
        f"exact match on the held-out table: {sum(correct):,} of {len(correct):,} = {accuracy:.1%}",
        f"on the validation part, {num_validation:,} rows: {validation_accuracy:.1%}",
        f"malformed answers, or of no known section: {sum(answer not in known for answer in answers):,}",
        f"always answering `{majority}`, the largest section in training: {majority_share:.1%}",
        f"parameters: {model.num_parameters():,}",
        f"training time, tokenizer included: {train_s / 60:.0f} minutes with {arguments.threads} threads on a CPU",
    )
    print(*figures, sep="\n")
    by_section = "\n".join(
        f"| {section} | {in_train[section]:,} | {count:,} | {right[section] / count:.0%} |"
        for section, count in sorted(in_test.items())
    )
    config = model.config
    card = CARD.format(
        **vars(arguments),
        example=answer_text("libdevel"),
        figures="\n".join(f"- {figure}" for figure in figures),
        num_rows=len(train_rows),
        num_validation=num_validation,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context=config.max_position_embeddings,
        template=PROMPT_TEMPLATE,
        by_section=by_section,
    )
    path.write_text(card, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-table", type=Path, default=EXAMPLES / "build" / "train.parquet")
    parser.add_argument("--test-table", type=Path, default=EXAMPLES / "data" / "debian_packages.parquet")
    parser.add_argument("--output", type=Path, default=EXAMPLES / "model", help="checkpoint folder")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training rows")
    parser.add_argument("--tokens-per-batch", type=int, default=4096, help="tokens a step, padding included")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices")
    parser.add_argument("--hidden-share", type=float, default=0.1, help="of prompt tokens hidden in training")
    parser.add_argument("--vocab-size", type=int, default=12288)
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, save in bfloat16, load what was saved, measure it, write the card."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    table_rows = read_rows(arguments.train_table)
    rows = [row for row in table_rows if not is_validation_source(row["source"])]
    validation_rows = [row for row in table_rows if is_validation_source(row["source"])]

    started_s = time.monotonic()
    tokenizer = train_tokenizer(rows, arguments.vocab_size)
    model = make_model(tokenizer, arguments.hidden_size, arguments.intermediate_size, arguments.layers)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens in the vocabulary", flush=True)
    validation_accuracy = train(model, tokenizer, rows, validation_rows, arguments)
    train_s = time.monotonic() - started_s

    tokenizer.save_pretrained(arguments.output)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(arguments.output)
    (arguments.output / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone

    test_rows = read_rows(arguments.test_table)
    saved = LlamaForCausalLM.from_pretrained(arguments.output, dtype=torch.float32).eval()
    write_model_card(
        arguments.output / "README.md",
        model=saved,
        arguments=arguments,
        train_rows=rows,
        num_validation=len(validation_rows),
        test_rows=test_rows,
        answers=generate_answers(saved, tokenizer, test_rows),
        validation_accuracy=validation_accuracy,
        train_s=train_s,
    )


if __name__ == "__main__":
    main()
