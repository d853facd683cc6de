"""Chooses a layout where nothing can be simulated: replicas of as few GPUs as hold the model.

It knows the bytes of the weights and of a GPU, and no rates. Pure.
"""

from pipemax.domain.choices import Policy
from pipemax.policy.layout_choice import FixedLayout
from pipemax.policy.layouts import Layout

WEIGHTS_FACTOR = 1.2
"""What weights take on a GPU, with activations and buffers, relative to their files."""
KV_SHARE = 0.1
"""Of each GPU's memory, which the KV cache has at least."""


def smallest_layout(
    *,
    num_gpus: int,
    gpu_bytes: float,
    memory_fraction: float,
    weight_bytes: float,
    num_heads: int | None,
    fixed: FixedLayout,
) -> Layout | None:
    """Return replicas of as few GPUs as hold the weights × 1.2 and leave a tenth of each GPU for KV.

    The GPUs of a replica share each layer (tensor parallelism) if the ``num_heads`` allow it: without knowledge of the
    links, that is the layout that is seldom bad. If all GPUs together are too small by this rule, one engine has all.
    ``memory_fraction`` is the share of a GPU that the engine may take. ``None`` if no layout is as ``fixed`` says.
    """
    layouts = [
        Layout(replicas=num_gpus // size, tensor_parallel=tensor, pipeline_parallel=size // tensor)
        for size in range(1, num_gpus + 1)
        for tensor in range(size, 0, -1)
        if num_gpus % size == 0
        and size % tensor == 0
        and (tensor == 1 or (num_heads is not None and num_heads % tensor == 0))
    ]
    allowed = [layout for layout in layouts if fixed.allows(layout)]
    room = (memory_fraction - KV_SHARE) * gpu_bytes
    holding = (one for one in allowed if one.gpus_per_engine * room >= WEIGHTS_FACTOR * weight_bytes)
    largest = max((one.gpus_per_engine for one in allowed), default=0)
    return next(holding, next((one for one in allowed if one.gpus_per_engine == largest), None))


def stock_if_open(policy: Policy) -> Policy:
    """Return the policy of an engine whose layout was chosen so: stock vLLM, unless the config names another."""
    return Policy.VLLM if policy is Policy.AUTO else policy
