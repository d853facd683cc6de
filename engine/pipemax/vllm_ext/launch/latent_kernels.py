"""Choose vLLM's kernels for latent attention (MLA) on a CPU.

vLLM prefers those for AMX where the CPU has it (any Xeon since Sapphire Rapids). They need blocks that follow one
another in memory, and PipeMax's blocks hold all layers' KV. ``CPU_MLA`` reads blocks that lie apart, on every CPU.
"""

import logging

from pipemax.vllm_ext.seam.vllm_types import (
    AttentionBackendEnum,
    AttentionConfig,
    EngineArgs,
    current_platform,
)

log = logging.getLogger(__name__)


def choose_latent_kernels(args: EngineArgs) -> None:
    """Name ``CPU_MLA`` for a model with latent attention on a CPU, unless the arguments name kernels already.

    It must be named before vLLM makes its config, whose block size and steps depend on it.
    """
    if not current_platform.is_cpu():
        return
    named = AttentionConfig.validate_backend_before(args.attention_backend) or args.attention_config.backend
    if named is None and args.create_model_config().use_mla:
        args.attention_backend = AttentionBackendEnum.CPU_MLA
        log.info(
            "policy pipemax runs the latent attention of %s with vLLM's kernels CPU_MLA, also on a CPU with AMX: "
            "those for AMX need blocks that follow one another",
            args.model,
        )
