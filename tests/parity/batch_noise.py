"""Logits that depend on how many rows a step has, as sums do on a GPU without batch-invariant kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.parity.engines import ParityEngine

_NOISE = 3.0


@contextmanager
def sums_by_batch(*engines: ParityEngine) -> Iterator[None]:
    """While this lasts, equal steps give equal tokens, and a row's tokens depend on the others of its steps."""
    for engine in engines:
        engine.call_workers(_sum_by_batch, True)
    try:
        yield
    finally:
        for engine in engines:
            engine.call_workers(_sum_by_batch, False)


def _sum_by_batch(worker: Any, is_on: bool) -> None:
    """Called on each worker."""
    model: Any = worker.model_runner.model
    if not is_on:
        del model.compute_logits
        return
    exact = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = exact(hidden_states, *args, **kwargs)
        if logits is None:
            return None
        num_rows, vocabulary = logits.shape
        return logits + _NOISE * torch.sin(torch.arange(vocabulary) * float(num_rows))

    model.compute_logits = compute_logits
