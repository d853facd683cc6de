"""The throughput of a node if only arithmetic took time: the bound that every system is measured against."""

import numpy as np

from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.sim.workloads import Workload


def operations(model: ModelSpec, workload: Workload) -> tuple[float, float]:
    """Return the floating point operations (products and attention) of all prompts, and of all outputs."""
    own_prompts = workload.prompt_tokens - workload.shared_prefix_tokens
    head = model.head_params  # only one token of a prompt passes the head, but every output does
    prompt_products = own_prompts.sum() * (model.active_params - head) + len(workload) * head
    # The first output comes with the prompt; the others are one decode step each.
    decode_tokens = (workload.output_tokens - 1).sum()
    pairs = own_prompts * (workload.shared_prefix_tokens + (own_prompts + 1) / 2)
    decode_pairs = (workload.output_tokens - 1) * (workload.prompt_tokens + workload.output_tokens / 2)
    per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
    prompt = 2 * prompt_products + per_pair * pairs.sum()
    decode = 2 * decode_tokens * model.active_params + per_pair * decode_pairs.sum()
    return float(prompt), float(decode)


def compute_bound_tokens_per_s(node: NodeSpec, model: ModelSpec, workload: Workload) -> float:
    """Return the total tokens per second if every GPU computed all the time at its achieved rate."""
    seconds = np.sum(operations(model, workload)) / (node.num_gpus * node.gpu.flops_per_s)
    return workload.total_tokens / float(seconds)
