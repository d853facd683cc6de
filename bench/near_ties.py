"""How close a call it was where two runs of one model chose different tokens.

Other batches sum in another order, so logits differ by rounding, and where the two best tokens lie closer together than
that, either may win. A wrong KV block moves logits by as much as they differ at all.
"""

from collections.abc import Mapping

Tokens = Mapping[str, tuple[int, ...]]


def logit_gaps(
    model: str, prompts: Mapping[str, str], ours: Tokens, theirs: Tokens
) -> dict[str, float | None]:
    """Request id → how far apart the logits of the two tokens lie where the answers first part, for those that do.

    In float64, by transformers, which knows nothing of blocks or batches. None where an answer merely ends before the
    other.
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
    """None where one is the other's beginning."""
    return next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
