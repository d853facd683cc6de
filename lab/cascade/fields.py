"""Compare scores of JSON answers: the probability of the whole answer, and that of the least sure compared field.

    python -m lab.cascade.fields [--seeds 200] [--records 6000]

Both demo models answer all 2,223 rows as in ``lab.cascade.demo``, once. Their one field is measured by the product's
own ``field_probabilities``. A record of three fields is three rows, drawn again for each seed: it stands for a schema
with three fields of which all are compared, or the first only (``--agree-fields``).
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from lab.cascade.demo import EXAMPLES, TEMPLATE, answered
from lab.cascade.tables import Table
from lab.cascade.trials import Ties, coins_of, labelled, make_draw, passed
from pipemax.answers.field_chances import field_probabilities
from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.equality import Answers, Equality
from pipemax_spark.cascade.promise import Promise


def answer(model_path: Path, prompts: list[str]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the greedy answers, the probability of each, and that of its field: 0 where an answer has none."""
    texts, whole, field = [], [], []
    for text, pieces, logprobs in answered(model_path, prompts):
        found = dict(field_probabilities(text, pieces, logprobs) or ())
        texts.append(text)
        whole.append(np.exp(sum(logprobs)))
        field.append(found.get("section", 0.0))
    return texts, np.array(whole), np.array(field)


def kept_share(scores: np.ndarray, differs: np.ndarray, promise: Promise, seed: str) -> float:
    table = Table(scores=scores, differs=differs, requests=np.arange(len(scores)))
    draw = make_draw(promise, len(scores), seed)
    ties, is_sampled = Ties(table, draw.seed), coins_of(draw.seed, table.requests) < draw.sample_share
    certificate = certify(draw, labelled(table, is_sampled, ties))
    return float(100 * (passed(table, certificate.cut, ties) & ~is_sampled).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--records", type=int, default=6_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = pq.read_table(EXAMPLES / "data" / "debian_packages.parquet").to_pylist()
    prompts = [TEMPLATE.format(**row) for row in rows]
    small, whole, field = answer(EXAMPLES / "model-small", prompts)
    large, _, _ = answer(EXAMPLES / "model", prompts)
    equality = Equality(answers=Answers.JSON)
    differs = np.array([equality.differ(one, other) for one, other in zip(small, large, strict=True)])
    print("| agree | compared | score | kept, %: median (5 % to 95 %) |", "|---|---|---|---|", sep="\n")
    for agree in (0.97, 0.95, 0.9):
        kept: dict[tuple[str, str], list[float]] = {}
        for number in range(options.seeds):
            drawn = np.random.default_rng(number).integers(len(rows), size=(options.records, 3))
            fields, apart = field[drawn], differs[drawn]
            tables = {
                ("the demo's one field", "whole answer"): (whole, differs),
                ("the demo's one field", "field"): (field, differs),
                ("three fields", "whole answer"): (whole[drawn].prod(1), apart.any(1)),
                ("three fields", "least sure field"): (fields.min(1), apart.any(1)),
                ("one of three", "whole answer"): (whole[drawn].prod(1), apart[:, 0]),
                ("one of three", "field"): (fields[:, 0], apart[:, 0]),
            }
            for name, (scores, wrong) in tables.items():
                share = kept_share(scores, wrong, Promise(agree=agree, confidence=0.95), f"{number:032x}")
                kept.setdefault(name, []).append(share)
        for (compared, score), shares in kept.items():
            low, middle, high = np.percentile(shares, [5, 50, 95])
            print(f"| {agree} | {compared} | {score} | {middle:.1f} ({low:.1f} to {high:.1f}) |", flush=True)


if __name__ == "__main__":
    main()
