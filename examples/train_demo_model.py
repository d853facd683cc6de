"""Train the demo model: a Llama of a few million parameters that names a Debian package's section in JSON.

Learns a byte-level BPE tokenizer and a LlamaForCausalLM from scratch on the training split that
`build_demo_table.py` wrote, on the CPU. Every text goes through the tokenizer's own chat template, so that what is
trained is what a server renders. The checkpoint that answers best on sources set aside from the training split is
kept; the shipped test table is read once, at the end, for the model card.

It knows nothing of vLLM. Threads sum in different orders on different machines, so that a second run comes close
to the first one's figures and does not repeat its weights bit for bit.

Run after build_demo_table.py: python examples/train_demo_model.py
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EXAMPLES = Path(__file__).resolve().parent
TEMPLATE = "Package: {package}\nSummary: {summary}\nDescription: {description}"
PAD, BOS, END, ASSISTANT = "<|pad|>", "<|bos|>", "<|end|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, "<|system|>", "<|user|>", ASSISTANT)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SELECTION_SOURCES = 0.03  # share of the training sources set aside to choose the checkpoint
MAX_ANSWER_TOKENS = 16

Row = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long and how hard to train."""

    epochs: int  # passes over the training rows; the last one sees descriptions of full length
    batch_tokens: int  # padded tokens in a batch
    learning_rate: float  # peak of the cosine
    prompt_loss_share: float  # share of the prompt's positions that also learn to predict their next token
    prompt_loss_weight: float  # their mean loss beside the answer's
    num_evaluations: int  # times the checkpoint is compared with the best one, evenly spread
    seed: int


def user_message(row: Row, description_characters: int) -> str:
    """The job's template filled in, with the description cut at a word boundary."""
    description = row["description"]
    if len(description) > description_characters:
        description = description[: description_characters + 1].rpartition(" ")[0]
    return TEMPLATE.format(package=row["package"], summary=row["summary"], description=description)


def answer(section: str) -> str:
    """The text that the model is to give, without the end-of-turn token."""
    return json.dumps({"section": section})


def train_tokenizer(rows: Sequence[Row], sections: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; names fall apart at hyphens, and every section begins with a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [user_message(row, len(row["description"])) for row in rows]
    # As many answers of each section as make its name frequent enough for one token.
    texts += [answer(section) for section in sections for _ in range(2_000)]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, BOS, END)],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    firsts = section_tokens(fast, sections)
    assert len(set(firsts)) == len(sections), "two sections begin with the same token"
    return fast


def section_tokens(tokenizer: PreTrainedTokenizerFast, sections: Sequence[str]) -> list[int]:
    """The token at which an answer commits itself to its section, for each section."""
    start = len(answer_start(tokenizer))
    return [tokenizer.encode(answer(section), add_special_tokens=False)[start] for section in sections]


def answer_start(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that all answers begin with, up to the section's name."""
    return tokenizer.encode(answer("").removesuffix('"}'), add_special_tokens=False)


def make_model(tokenizer: PreTrainedTokenizerFast, arguments: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with fresh weights and tied embeddings."""
    num_heads = arguments.hidden_size // arguments.head_dim
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=arguments.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def render_prompts(tokenizer: PreTrainedTokenizerFast, messages: Sequence[str]) -> list[list[int]]:
    """Token ids of the rendered chats, up to where the model is to answer: what a server sends to the model."""
    chats = [[{"role": "user", "content": message}] for message in messages]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def render_conversations(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], limits: Sequence[int]
) -> list[list[int]]:
    """Token ids of whole conversations, answers included; descriptions are cut at `limits` characters."""
    chats = [
        [
            {"role": "user", "content": user_message(row, limit)},
            {"role": "assistant", "content": answer(row["section"])},
        ]
        for row, limit in zip(rows, limits, strict=True)
    ]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def pad_right(sequences: Sequence[list[int]], pad_id: int) -> torch.Tensor:
    """(sequences, longest) token ids. Causal attention never looks right, so that the padding needs no mask."""
    longest = max(map(len, sequences))
    return torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids in sequences])


def plan_batches(lengths: Sequence[int], batch_tokens: int, rng: random.Random) -> list[list[int]]:
    """Indices of rows in batches of about equal length and at most `batch_tokens` padded tokens, shuffled."""
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], rng.random()))
    batches: list[list[int]] = [[]]
    for index in order:
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    rng.shuffle(batches)
    return batches


def epoch_batches(
    tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], config: TrainConfig, epoch: int
) -> list[list[list[int]]]:
    """Batches of rendered rows. Descriptions are cut at a random length: mostly short until the last epoch."""
    rng = random.Random(f"{config.seed}/{epoch}")
    longest = max(len(row["description"]) for row in rows)
    if epoch + 1 < config.epochs:
        limits = [int(longest * rng.random() ** 2.5) for _ in rows]
    else:
        limits = [min(longest, int(2 * longest * rng.random() ** 1.5)) for _ in rows]
    conversations = render_conversations(tokenizer, rows, limits)
    batches = plan_batches([len(ids) for ids in conversations], config.batch_tokens, rng)
    return [[conversations[index] for index in batch] for batch in batches]


def batch_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, ids_of: tuple[int, int], config: TrainConfig
) -> torch.Tensor:
    """Loss summed over an answer and averaged over rows, plus the weighted loss of some prompt positions."""
    assistant_id, pad_id = ids_of
    targets = ids[:, 1:]
    in_answer = (ids == assistant_id).cumsum(dim=1)[:, :-1].bool() & (targets != pad_id)
    in_prompt = ~in_answer & (targets != pad_id) & (torch.rand(targets.shape) < config.prompt_loss_share)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    answer_loss = cross_entropy(model.lm_head(hidden[in_answer]).float(), targets[in_answer], reduction="sum")
    prompt_loss = cross_entropy(model.lm_head(hidden[in_prompt]).float(), targets[in_prompt])
    return answer_loss / len(ids) + config.prompt_loss_weight * prompt_loss


def make_optimizer(model: LlamaForCausalLM, learning_rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)


def rate_at(progress: float) -> float:
    """Learning rate over its peak: linear over the first 3 %, then a cosine down to a fiftieth."""
    return min(progress / 0.03, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train_rows: Sequence[Row],
    selection_rows: Sequence[Row],
    config: TrainConfig,
    output: Path,
) -> None:
    """Train, and keep in `output` the checkpoint that is right on most of `selection_rows`."""
    optimizer = make_optimizer(model, config.learning_rate)
    ids_of = (tokenizer.convert_tokens_to_ids(ASSISTANT), tokenizer.pad_token_id)
    started, num_tokens, best, evaluations, mean_loss = time.monotonic(), 0, -1.0, 0, math.nan
    for epoch in range(config.epochs):
        batches = epoch_batches(tokenizer, train_rows, config, epoch)
        for step, batch in enumerate(batches, start=1):
            progress = (epoch + step / len(batches)) / config.epochs
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * rate_at(progress)
            with torch.autocast("cpu", torch.bfloat16):
                loss = batch_loss(model, pad_right(batch, ids_of[1]), ids_of, config)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            num_tokens += sum(map(len, batch))
            mean_loss = loss.item() if math.isnan(mean_loss) else 0.98 * mean_loss + 0.02 * loss.item()
            if step % 50 == 0:
                elapsed_s = time.monotonic() - started
                print(
                    f"{elapsed_s:6.0f} s  {progress:6.1%}  loss {mean_loss:.3f}  {num_tokens / elapsed_s:,.0f} tokens/s",
                    flush=True,
                )
            if progress * config.num_evaluations >= evaluations + 1:
                evaluations += 1
                share = accuracy(choose_sections(model, tokenizer, selection_rows), selection_rows)
                print(f"        {progress:6.1%}  right on the rows set aside: {share:.1%}", flush=True)
                if share >= best:
                    best = share
                    save_checkpoint(model, tokenizer, output)


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    shipped = LlamaForCausalLM(model.config).to(torch.bfloat16)
    shipped.load_state_dict(weights)
    shipped.generation_config.update(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    shipped.save_pretrained(output)
    tokenizer.save_pretrained(output)


def length_sorted_chunks(prompts: Sequence[list[int]], rows_each: int) -> Iterator[list[int]]:
    """Indices of prompts in chunks of about equal length."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), rows_each):
        yield order[start : start + rows_each]


@torch.inference_mode()
def choose_sections(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row]
) -> list[str]:
    """The likeliest section for each row when nothing but a section may be said."""
    sections = list(model.config.sections)
    firsts = torch.tensor(section_tokens(tokenizer, sections))
    start = answer_start(tokenizer)
    prompts = render_prompts(tokenizer, [user_message(row, len(row["description"])) for row in rows])
    prompts = [prompt + start for prompt in prompts]
    chosen = [""] * len(rows)
    for chunk in length_sorted_chunks(prompts, 64):
        ids = pad_right([prompts[index] for index in chunk], tokenizer.pad_token_id)
        lasts = torch.tensor([len(prompts[index]) - 1 for index in chunk])
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[torch.arange(len(chunk)), lasts])[:, firsts]
        for index, choice in zip(chunk, logits.argmax(dim=1).tolist(), strict=True):
            chosen[index] = sections[choice]
    return chosen
