"""Run the KV kernels on the CPU: the source that NVRTC compiles, built as C++ behind ``cuda_on_cpu.h``."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pipemax.transfer.cuda.kernels import Argument
from pipemax.transfer.cuda.launch_checks import WORD_BYTES, Geometry

_HEADER = Path(__file__).with_name("cuda_on_cpu.h")
_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Werror", "-fsanitize=alignment,signed-integer-overflow"]


def cxx_compiler() -> str:
    """Return the path of a C++ compiler; skip the test if there is none."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine: the kernels cannot run on its CPU")
    return compiler


class CpuKernels:
    def __init__(self, source: str, directory: Path) -> None:
        """Build ``source`` in ``directory``."""
        launchers = "".join(
            f'extern "C" bool launch_{name}(void** arguments, int num_groups, int num_threads, const int* order) '
            f"{{ return cuda_on_cpu::launch({name}, arguments, num_groups, num_threads, order); }}\n"
            for name in (f"offload_tokens_{word}" for word in WORD_BYTES)
        )
        program, built, library = (directory / name for name in ("kernels.cpp", "kernels.o", "kernels.so"))
        program.write_text(f'#include "{_HEADER}"\n{source}\n{launchers}')
        compiler = cxx_compiler()
        subprocess.run([compiler, *_FLAGS, "-c", program, "-o", built], check=True)
        # Without -fsanitize, so that no library of the sanitizer is linked: the header has what the checks call.
        subprocess.run([compiler, "-shared", built, "-o", library], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(self, geometry: Geometry, arguments: list[Argument], order: np.ndarray) -> None:
        """Run every thread once. ``AssertionError`` where an access is misaligned or a number overflows.

        ``order``: int32, a permutation of the launch's threads, counted over all thread blocks.
        """
        values = [np.array(argument) for argument in arguments]  # an address is a number of 64 bits
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        launch = getattr(self._library, f"launch_offload_tokens_{geometry.word_bytes}")
        launch.restype = ctypes.c_bool
        num_threads = (geometry.num_groups, geometry.num_threads)
        assert launch(addresses, *num_threads, ctypes.c_void_p(order.ctypes.data)), (
            f"{launch.__name__}: a misaligned access, or a number that overflowed"
        )
