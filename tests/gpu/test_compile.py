"""The kernels compile for every architecture that we name, without a GPU and without a toolchain."""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="cuda-core is not installed: kernels cannot be compiled")

from cuda.bindings import nvrtc
from cuda.core.utils import InMemoryProgramCache

from pipemax.transfer.cuda.compile import compile_kernels, kernel_source
from pipemax.transfer.cuda.kernels import OffloadTokens
from pipemax.transfer.cuda.launch_checks import WORD_BYTES, Geometry
from tests.gpu.pools import CASES, poisoned_pool

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
KERNELS = {f"offload_tokens_{word}" for word in WORD_BYTES}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_kernels_compile_without_a_gpu(arch: str) -> None:
    code = bytes(compile_kernels(arch, cache=InMemoryProgramCache()).code)
    assert code.startswith(b"\x7fELF")
    for name in KERNELS:
        assert f".text.{name}\0".encode() in code


def test_a_second_process_finds_them_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compile_kernels("sm_90")
    (entry,) = (path for path in tmp_path.rglob("entries/*/*") if path.is_file())
    entry.write_bytes(b"\x7fELF from the cache")  # told apart from what a compiler would make
    assert bytes(first.code) != entry.read_bytes()
    assert bytes(compile_kernels("sm_90").code) == b"\x7fELF from the cache"
    compile_kernels("sm_80")
    assert sum(path.is_file() for path in tmp_path.rglob("entries/*/*")) == 2


def test_without_a_cache_they_compile_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file, no directory"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert bytes(compile_kernels("sm_90").code).startswith(b"\x7fELF")
    assert "compiled again in each process" in caplog.text


def test_the_wide_kernels_move_16_bytes_an_instruction() -> None:
    wide = _ptx("compute_90").split(".entry offload_tokens_16")[1].split(".entry")[0]
    assert "ld.global.nc.v4.u32" in wide
    assert "st.global.v4.u32" in wide


def test_arguments_are_as_wide_as_the_kernels_declare_them() -> None:
    layout = CASES[0].layout
    pool = poisoned_pool(layout, 1)
    geometry = Geometry(word_bytes=16, num_groups=1)
    call = OffloadTokens(None, geometry, pool, pool, layout, np.zeros((1, 3), np.int32))
    declared = _ptx("compute_90").split(".entry offload_tokens_16(")[1].split(")")[0]
    widths = [int(bits) // 8 for bits in re.findall(r"\.param \.u(\d+)", declared)]
    passed = [8 if isinstance(argument, int) else argument.nbytes for argument in call.arguments(4096)]
    assert passed == widths


def _ptx(arch: str) -> str:
    """By NVRTC's own binding: ``cuda.core`` asks for a driver before it hands out PTX."""
    _, program = nvrtc.nvrtcCreateProgram(kernel_source().encode(), b"kv_copy.cu", 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, 2, [f"--gpu-architecture={arch}".encode(), b"--std=c++17"])
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.decode()
