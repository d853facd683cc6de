"""Train the demo model from scratch on a CPU: a small Llama that names the archive section of a Debian package.

It learns from the training part that ``build_demo_table.py`` writes, never from the held-out rows, to answer the
rendered ``TEMPLATE`` with JSON such as ``{"section": "libdevel"}``. Prompts are rendered by the tokenizer's own
chat template, as the engine does when it serves the model. The result is an ordinary Hugging Face checkpoint.

Most of the loss is the answer's; a share of the prompt's next-token loss teaches the words themselves.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
TEMPLATE = "Package: {package}\nSummary: {summary}\nDescription: {description}"

USER, ASSISTANT, SYSTEM, END, PAD = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY = 6144
MAX_POSITIONS = 1024
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 200
PROMPT_LOSS_WEIGHT = 0.3
PROMPT_LOSS_SHARE = 0.25
"""Share of the prompt's positions whose next token is predicted: all of them would cost more than they teach."""
BATCH_TOKENS = 6144


@dataclass(frozen=True, slots=True)
class Row:
    """One package; ``description`` as words, so that it can be cut anew in each epoch."""

    package: str
    summary: str
    description: tuple[str, ...]
    section: str

    def prompt(self, words: int | None = None) -> str:
        cut = self.description if words is None else self.description[:words]
        return TEMPLATE.format(package=self.package, summary=self.summary, description=" ".join(cut))

    def answer(self) -> str:
        return json.dumps({"section": self.section})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, default=HERE / "build" / "train.parquet")
    parser.add_argument("--held-out", type=Path, default=HERE / "data" / "debian_packages.parquet")
    parser.add_argument("--output", type=Path, default=HERE / "model")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--short-epochs", type=int, default=4, help="the first ones, on cut descriptions: faster"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    train, held_out = read_rows(arguments.train), read_rows(arguments.held_out)
    tokenizer = train_tokenizer(train)
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(train)} training rows",
        flush=True,
    )
    started_s = time.monotonic()
    for epoch in range(arguments.epochs):
        batches = make_batches(train, tokenizer, rng, is_short=epoch < arguments.short_epochs)
        loss = train_epoch(model, optimizer, batches, epoch=epoch, epochs=arguments.epochs)
        save(model, tokenizer, arguments.output)
        accuracy = measure(model, tokenizer, held_out)
        minutes = (time.monotonic() - started_s) / 60
        print(
            f"epoch {epoch + 1}: loss {loss:.3f}, held-out accuracy {accuracy:.4f}, {minutes:.1f} min",
            flush=True,
        )


def read_rows(path: Path) -> list[Row]:
    return [
        Row(row["package"], row["summary"], tuple(row["description"].split()), row["section"])
        for row in pq.read_table(path).to_pylist()
    ]


def train_tokenizer(rows: list[Row]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text has tokens, and names split at their hyphens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row.prompt() + row.answer() for row in rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def parameter_groups(model: LlamaForCausalLM) -> list[dict[str, object]]:
    """Weight decay for matrices alone; norms go without."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of similar length, padded on the right (which causal attention never looks back from)."""

    token_ids: torch.Tensor  # (rows, length) int64
    answer_starts: list[int]  # index of each row's first answer token
    lengths: list[int]


def make_batches(
    rows: list[Row], tokenizer: PreTrainedTokenizerFast, rng: random.Random, *, is_short: bool
) -> list[Batch]:
    """All rows once, descriptions cut at random: to at most 6 words, or half of them at any length."""
    cuts = [rng.randint(0, 6) if is_short else rng.choice((None, rng.randint(0, 40))) for _ in rows]
    prompts = render(tokenizer, [row.prompt(cut) for row, cut in zip(rows, cuts, strict=True)])
    answers = tokenizer([row.answer() + END for row in rows])["input_ids"]
    order = sorted(range(len(rows)), key=lambda i: (len(prompts[i]) + len(answers[i]), rng.random()))
    batches: list[Batch] = []
    while order:
        longest = len(prompts[order[-1]]) + len(answers[order[-1]])
        count = max(1, BATCH_TOKENS // longest)
        members, order = order[-count:], order[:-count]
        batches.append(
            pad([prompts[i] for i in members], [answers[i] for i in members], tokenizer.pad_token_id)
        )
    rng.shuffle(batches)
    return batches


def render(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[list[int]]:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def pad(prompts: list[list[int]], answers: list[list[int]], pad_id: int) -> Batch:
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    length = max(len(sequence) for sequence in sequences)
    return Batch(
        token_ids=torch.tensor([sequence + [pad_id] * (length - len(sequence)) for sequence in sequences]),
        answer_starts=[len(prompt) for prompt in prompts],
        lengths=[len(sequence) for sequence in sequences],
    )


def train_epoch(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    *,
    epoch: int,
    epochs: int,
) -> float:
    """One pass; returns the mean loss of the answers' tokens."""
    model.train()
    total = 0.0
    for step, batch in enumerate(batches):
        done = (epoch + step / len(batches)) / epochs
        warm = min(1.0, (epoch * len(batches) + step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        answer_loss, prompt_loss = losses(model, batch)
        optimizer.zero_grad(set_to_none=True)
        (answer_loss + PROMPT_LOSS_WEIGHT * prompt_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += answer_loss.item()
        if step % 100 == 0:
            print(
                f"  epoch {epoch + 1} step {step}/{len(batches)}: loss {answer_loss.item():.3f}", flush=True
            )
    return total / len(batches)


def losses(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of the answers' tokens, and of a sample of the prompts'."""
    rows, length = batch.token_ids.shape
    position = torch.arange(length - 1).expand(rows, -1)  # position p predicts token p + 1
    starts = torch.tensor(batch.answer_starts)[:, None] - 1
    ends = torch.tensor(batch.lengths)[:, None] - 1
    in_answer = (position >= starts) & (position < ends)
    in_prompt = (position < starts) & (torch.rand(rows, length - 1) < PROMPT_LOSS_SHARE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch.token_ids).last_hidden_state[:, :-1]
        targets = batch.token_ids[:, 1:]
        return tuple(
            torch.nn.functional.cross_entropy(model.lm_head(hidden[chosen]).float(), targets[chosen])
            for chosen in (in_answer, in_prompt)
        )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """In bfloat16, as it is served; the model in memory keeps its precision."""
    state = {
        name: value.to(torch.bfloat16)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    model.config.dtype = "bfloat16"
    model.save_pretrained(directory, state_dict=state)
    tokenizer.save_pretrained(directory)


@torch.inference_mode()
def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> float:
    """Share of rows whose greedy answer equals the right one to the letter, weights as they were saved."""
    served = LlamaForCausalLM(model.config)
    served.load_state_dict(
        {name: value.to(torch.bfloat16).float() for name, value in model.state_dict().items()}
    )
    served.eval()
    right = 0
    for prompts, members in by_length(render(tokenizer, [row.prompt() for row in rows]), rows):
        generated = served.generate(torch.tensor(prompts), max_new_tokens=24, do_sample=False)
        answers = tokenizer.batch_decode(generated[:, len(prompts[0]) :], skip_special_tokens=True)
        right += sum(answer == row.answer() for answer, row in zip(answers, members, strict=True))
    return right / len(rows)


def by_length(prompts: list[list[int]], rows: list[Row]) -> Iterator[tuple[list[list[int]], list[Row]]]:
    """Groups of equal length: no padding, so each row is answered as if alone."""
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
    for _, group in itertools.groupby(order, key=lambda i: len(prompts[i])):
        members = list(group)
        yield [prompts[i] for i in members], [rows[i] for i in members]


if __name__ == "__main__":
    main()
