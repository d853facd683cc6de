"""Guess a stage's step times before anything is known of it.

An engine measures itself by the guess at its first start, or begins with it where it may not measure. The estimator's
scales follow what is measured, so a guess is soon corrected in proportion.

On a GPU the guess is the roofline of an L20 from the presets, half of whose memory is weights: they are read once per
step, and each takes two operations per token. For any GPU, that is nearer than a CPU's figures.
"""

from pipemax.control.controller_config import StageConfig
from pipemax.domain.step_times import StepTimeModel
from pipemax.presets import load_node

_GPU_PRESET = "l20x8"
_WEIGHTS_SHARE = 0.5
"""Share of the GPU's memory."""
_HEADS_PER_KV_HEAD = 8


def guess_stage(kv_bytes_per_token: int, *, kv_value_bytes: int, is_cpu: bool) -> StageConfig:
    """Guess a stage's config from its KV of a token and of one value; on a GPU, for weights in 16 bits."""
    if is_cpu:
        return _on_cpu(kv_bytes_per_token)
    return _on_gpu(kv_bytes_per_token, kv_values=kv_bytes_per_token // kv_value_bytes)


def _on_cpu(kv_bytes_per_token: int) -> StageConfig:
    return StageConfig(
        kv_bytes_per_token=kv_bytes_per_token,
        h2d_bytes_per_s=4e9,
        decode_time=StepTimeModel.linear(alpha_s=1e-3, beta_s=1e-7, delta_s=1e-2),
        prefill_time=StepTimeModel.linear(alpha_s=1e-3, beta_s=1e-8, delta_s=1e-2),
    )


def _on_gpu(kv_bytes_per_token: int, *, kv_values: int) -> StageConfig:
    node = load_node(_GPU_PRESET)
    gpu = node.gpu
    weight_bytes = _WEIGHTS_SHARE * gpu.memory_bytes
    token_s = weight_bytes / gpu.flops_per_s  # two bytes and two operations per weight
    step_s = weight_bytes / gpu.hbm_bytes_per_s + gpu.step_overhead_s
    # Each key and each value is multiplied and added, for each query head of its group.
    pair_s = _HEADS_PER_KV_HEAD * 2 * kv_values / gpu.flops_per_s
    return StageConfig(
        kv_bytes_per_token=kv_bytes_per_token,
        h2d_bytes_per_s=node.link.host_to_gpu_bytes_per_s,
        decode_time=StepTimeModel.linear(
            alpha_s=token_s, beta_s=kv_bytes_per_token / gpu.hbm_bytes_per_s, delta_s=step_s
        ),
        prefill_time=StepTimeModel.linear(alpha_s=token_s, beta_s=pair_s, delta_s=step_s),
    )
