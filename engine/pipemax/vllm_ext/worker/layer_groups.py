"""Watch a stage's model compute its groups of layers, whose KV a wave overwrites behind the computation.

Only attention reads and writes KV, so the borders of a group are calls of its first and of its last attention layer,
whatever the model computes around them. Hooks are called only where layers run as Python: in a compiled model or in
CUDA graphs nobody would call them, and an engine with those refuses waves at its start.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def layers_in_order(kv_caches: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of a stage's layers in the order of their parts of a block.

    ``ValueError`` unless that is the order in which the model computes them, each with KV of its own.
    """
    names = sorted(kv_caches, key=lambda name: kv_caches[name].storage_offset())
    if len({cache.storage_offset() for cache in kv_caches.values()}) < len(names):
        raise ValueError("waves: on needs KV of its own for every layer, and layers of this model share some")
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    if numbers != sorted(numbers):
        raise ValueError(f"waves: on needs the layers of a KV block in their order, not {', '.join(names)}")
    return names


def watch_groups(
    groups: Sequence[Sequence[torch.nn.Module]], begin: Callable[[int], None], end: Callable[[int], None]
) -> None:
    """Call ``begin`` and ``end`` with a group's number when the first of its modules is called and the last returns."""
    for group, modules in enumerate(groups):
        modules[0].register_forward_pre_hook(_calling(begin, group))
        modules[-1].register_forward_hook(_calling(end, group))


def _calling(call: Callable[[int], None], group: int) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        call(group)

    return hook
