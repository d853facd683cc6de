"""CUDA C++ to machine code by NVRTC, at first use: no toolchain is asked of the user, and no GPU to compile.

``cuda.core`` compiles and keeps the result in the user's cache (``$XDG_CACHE_HOME/cuda-python``), under a key of the
source, the architecture and NVRTC's version. Knows nothing of what the kernels do.
"""

import logging
from importlib.resources import files

from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, ProgramCacheResource

log = logging.getLogger(__name__)

SOURCES = ("kv_copy.h", "kv_copy.cu")
"""Under ``transfer/csrc``, in this order one after the other: NVRTC then needs no include path."""


def kernel_source() -> str:
    """The whole program."""
    csrc = files("pipemax.transfer").joinpath("csrc")
    return "\n".join(csrc.joinpath(name).read_text(encoding="utf-8") for name in SOURCES)


def compile_kernels(arch: str, *, cache: ProgramCacheResource | None = None) -> ObjectCode:
    """The kernels for ``arch``, such as ``"sm_90"``, as a cubin.

    ``cache``: by default on disk, for all processes of the user. ``cuda.core`` raises with NVRTC's log where the
    source or the architecture is wrong.
    """
    options = ProgramOptions(name="kv_copy.cu", arch=arch, std="c++17")
    program = Program(kernel_source(), "c++", options)
    if cache is not None:
        return program.compile("cubin", cache=cache)
    try:
        disk_cache = FileStreamProgramCache()
    except OSError as error:
        log.warning("KV kernels are compiled anew in each process, the cache cannot be used: %s", error)
        return program.compile("cubin")
    with disk_cache:
        return program.compile("cubin", cache=disk_cache)
