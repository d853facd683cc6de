"""Find out whether a stage's activations enter its GPU by the copy engine, which its prefetches keep busy.

NCCL's kernels read them: from the GPU before where the two are peers, and otherwise from host memory. The copy engine
carries them only if NCCL is told so (``src/transport/shm.cc`` of NCCL 2.29). Whether two GPUs are peers says nothing of
it. It also does not say which way NCCL goes: by default NCCL uses host memory between peers on two host bridges.
"""

import logging
import os
from collections.abc import Mapping

log = logging.getLogger(__name__)

_RECEIVES = 2
"""The bit of ``NCCL_SHM_MEMCPY_MODE`` for the receiving side; 1 is for the sending side, and the default."""


def arrive_by_copy_engine(stage: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether they do on this stage, from 0, and log what follows."""
    if stage == 0:
        return False
    uses_copies = _number(environ, "NCCL_SHM_USE_CUDA_MEMCPY", 0) != 0
    by_copy_engine = uses_copies and bool(_number(environ, "NCCL_SHM_MEMCPY_MODE", 1) & _RECEIVES)
    if by_copy_engine:
        log.info(
            "NCCL_SHM_USE_CUDA_MEMCPY has activations of stage %d arrive by the copy engine: prefetches go in pieces "
            "and give way to them",
            stage,
        )
    else:
        log.info("activations of stage %d arrive by NCCL's kernels: prefetches go in one call", stage)
    return by_copy_engine


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Read a number as NCCL does, which takes its default for what is none."""
    try:
        return int(environ.get(name, ""), 0)
    except ValueError:
        return default
