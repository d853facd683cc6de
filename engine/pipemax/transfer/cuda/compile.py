"""Compile CUDA C++ to machine code with NVRTC at first use: the user needs no toolchain, and compiling needs no GPU.

``cuda.core`` compiles and keeps the result in the user's cache (``$XDG_CACHE_HOME/cuda-python``), under a key of the
source, the architecture and NVRTC's version. This module does not know what the kernels do.
"""

import logging
from importlib.resources import files

from cuda.core import ObjectCode, Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache, ProgramCacheResource

log = logging.getLogger(__name__)

SOURCES = ("kv_copy.h", "kv_copy.cu")
"""Files under ``transfer/csrc``, concatenated in this order: NVRTC then needs no include path."""


def kernel_source() -> str:
    """Return the source of the whole program."""
    csrc = files("pipemax.transfer").joinpath("csrc")
    return "\n".join(csrc.joinpath(name).read_text(encoding="utf-8") for name in SOURCES)


def compile_kernels(arch: str, *, cache: ProgramCacheResource | None = None) -> ObjectCode:
    """Compile the kernels for ``arch``, such as ``"sm_90"``, to a cubin.

    ``cache`` is on disk by default, for all processes of the user. If the source or the architecture is wrong,
    ``cuda.core`` raises with NVRTC's log.
    """
    options = ProgramOptions(name="kv_copy.cu", arch=arch, std="c++17")
    program = Program(kernel_source(), "c++", options)
    if cache is not None:
        return program.compile("cubin", cache=cache)
    try:
        disk_cache = FileStreamProgramCache()
    except OSError as error:
        log.warning("KV kernels are compiled again in each process, the cache cannot be used: %s", error)
        return program.compile("cubin")
    with disk_cache:
        return program.compile("cubin", cache=disk_cache)
