"""Tells how close two tokens were where two runs of one model chose differently.

Different batches sum in different orders, so logits differ by rounding, and where the two best tokens are closer than
that, either may win. A wrong KV block, in contrast, changes logits by as much as they differ at all.
"""

from collections.abc import Mapping

Tokens = Mapping[str, tuple[int, ...]]


def logit_gaps(
    model: str, prompts: Mapping[str, str], ours: Tokens, theirs: Tokens
) -> dict[str, float | None]:
    """Return how far apart the two tokens' logits are where two answers first differ, by request id, for those that do.

    They are computed in float64 by transformers, which knows nothing of blocks or batches. The value is None if one
    answer merely ends before the other.
    """
    parted = {
        name: _first_difference(ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]
    }
    if not parted:
        return {}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    gaps: dict[str, float | None] = {}
    for name, place in parted.items():
        if place is None:
            gaps[name] = None
            continue
        before = [*tokenizer(prompts[name])["input_ids"], *ours[name][:place]]
        with torch.no_grad():
            logits = exact(torch.tensor([before])).logits[0, -1]
        gaps[name] = abs(float(logits[ours[name][place]] - logits[theirs[name][place]]))
    return gaps


def _first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int | None:
    """Return the first index at which the tokens differ; None if one answer is the beginning of the other."""
    return next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
