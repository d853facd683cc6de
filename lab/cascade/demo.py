"""Replay a cascade of the two demo models over the demo table under many seeds, after asking each model once.

    python -m lab.cascade.demo [--seeds 1000] [--agree 0.97 0.95 0.9]

Both models answer all 2,223 rows greedily with Hugging Face's ``generate``, in float32 and without a schema. The score
is the probability of the small model's answer. Then the product's own coins and certificates decide under each seed, 0
and up, which rows keep the small answer, and the rows that differ are counted. The command fails if more than 73 of
1,000 seeds break the promise or the bound of their certificate (p < 0.001).
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.cascade.__main__ import most_violations
from lab.cascade.tables import Table
from lab.cascade.trials import Ties, coins_of, labelled, make_draw, passed
from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.equality import Answers, Equality
from pipemax_spark.cascade.promise import Promise

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = "Package: {package}\nSummary: {summary}\nDescription: {description}"
BATCH_ROWS = 64


@torch.inference_mode()
def answered(model_path: Path, prompts: list[str]) -> Iterator[tuple[str, list[str], list[float]]]:
    """Yield each prompt's greedy answer, the texts of its tokens, and their log-probabilities, the end's too."""
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for start in range(0, len(prompts), BATCH_ROWS):
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts[start : start + BATCH_ROWS]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        generated = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        answers = generated.sequences[:, inputs["input_ids"].shape[1] :]
        logprobs = torch.stack(generated.logits, 1).log_softmax(-1).gather(2, answers[..., None])[..., 0]
        for ids, of_tokens in zip(answers, logprobs, strict=True):
            is_own = ids != tokenizer.pad_token_id  # what pads a shorter answer does not count
            pieces = [tokenizer.decode([token]) for token in ids[is_own].tolist()]
            yield tokenizer.decode(ids, skip_special_tokens=True), pieces, of_tokens[is_own].tolist()


def answer(model_path: Path, prompts: list[str]) -> tuple[list[str], np.ndarray]:
    """Return the greedy answers and the probability of each."""
    rows = [(text, np.exp(sum(logprobs))) for text, _, logprobs in answered(model_path, prompts)]
    return [text for text, _ in rows], np.array([probability for _, probability in rows])


def replay(table: Table, promise: Promise, seeds: int) -> bool:
    """Print what came of the seeds; return whether the promise held as often as it must."""
    rows = len(table.scores)
    over_budget = over_bound = 0
    kept_shares = []
    for number in range(seeds):
        draw = make_draw(promise, rows, f"{number:032x}")
        ties, is_sampled = Ties(table, draw.seed), coins_of(draw.seed, table.requests) < draw.sample_share
        certificate = certify(draw, labelled(table, is_sampled, ties))
        kept = passed(table, certificate.cut, ties) & ~is_sampled
        misses = int((table.differs & kept).sum())
        over_budget += misses > certificate.budget_rows
        over_bound += misses > certificate.max_misses
        kept_shares.append(100 * kept.mean())
    low, middle, high = np.percentile(kept_shares, [5, 50, 95])
    print(
        f"| {promise.agree} | {promise.budget(rows)} | {100 * promise.default_sample_share(rows):.1f} | "
        f"{middle:.1f} ({low:.1f} to {high:.1f}) | {over_budget} | {over_bound} |"
    )
    return max(over_budget, over_bound) <= most_violations(seeds, promise.risk)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1_000)
    parser.add_argument("--agree", type=float, nargs="+", default=[0.97, 0.95, 0.9])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = pq.read_table(EXAMPLES / "data" / "debian_packages.parquet").to_pylist()
    prompts = [TEMPLATE.format(**row) for row in rows]
    small, scores = answer(EXAMPLES / "model-small", prompts)
    large, _ = answer(EXAMPLES / "model", prompts)
    equality = Equality(answers=Answers.JSON)
    differs = np.array([equality.differ(one, other) for one, other in zip(small, large, strict=True)])
    above = stats.mannwhitneyu(scores[~differs], scores[differs]).statistic
    auc = above / (differs.sum() * (~differs).sum())
    print(
        f"the small answer is the large one's in {1 - differs.mean():.1%} of {len(rows):,} rows; AUC {auc:.3f}\n"
    )
    print(
        "| agree | budget, rows | sampled, % | kept, %: median (5 % to 95 %) | over the budget | over the bound |"
    )
    print("|---|---|---|---|---|---|")
    table = Table(scores=scores, differs=differs, requests=np.arange(len(rows)))
    held = [replay(table, Promise(agree=agree, confidence=0.95), options.seeds) for agree in options.agree]
    if not all(held):
        sys.exit("a promise was broken more often than chance explains")


if __name__ == "__main__":
    main()
