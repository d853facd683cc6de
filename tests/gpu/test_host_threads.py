"""The kernels' own code, run on the CPU thread by thread, makes what the torch reference makes."""

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.stage import kernel_reference
from pipemax.transfer.cuda.launch_checks import Geometry, token_geometry
from tests.gpu.pools import CASES, Case, poisoned_pool, random_pool, random_tokens, seeds

NUM_THREADS = 32
GPU_BLOCKS, HOST_BLOCKS, TOKENS = 5, 7, 11


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine: the kernels' code cannot run on its CPU")
    built = tmp_path_factory.mktemp("host_threads") / "host_threads.so"
    source = Path(__file__).with_name("host_threads.cpp")
    include = str(files("pipemax.transfer").joinpath("csrc"))
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, f"-I{include}", str(source), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def run_offload(
    library: ctypes.CDLL,
    case: Case,
    gpu: torch.Tensor,
    host: torch.Tensor,
    tokens: np.ndarray,
    order: np.ndarray,
) -> Geometry:
    layout = case.layout
    geometry = token_geometry(layout, len(tokens), gpu.data_ptr(), host.data_ptr(), max_groups=4)
    getattr(library, f"offload_tokens_{geometry.word_bytes}")(
        ctypes.c_void_p(gpu.data_ptr()),
        ctypes.c_void_p(host.data_ptr()),
        ctypes.c_void_p(tokens.ctypes.data),
        len(tokens),
        ctypes.c_longlong(layout.block_bytes),
        ctypes.c_longlong(layout.layer_stride_bytes),
        layout.num_layers,
        layout.num_kv_heads,
        layout.block_tokens,
        layout.content_bytes,
        ctypes.c_void_p(order.ctypes.data),
        geometry.num_groups,
        NUM_THREADS,
    )
    return geometry


def orders(num_groups: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Threads run in no order that anyone promised."""
    forward = np.arange(num_groups * NUM_THREADS, dtype=np.int32)
    return [forward, forward[::-1].copy(), rng.permutation(forward)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_arrive_and_nothing_else_is_touched(library: ctypes.CDLL, case: Case) -> None:
    for rng in seeds(4):
        gpu = random_pool(case.layout, GPU_BLOCKS, rng)
        tokens = random_tokens(case.layout, TOKENS, GPU_BLOCKS, HOST_BLOCKS, rng)
        expected = poisoned_pool(case.layout, HOST_BLOCKS)
        kernel_reference.offload_tokens(gpu, expected, case.layout, torch.from_numpy(tokens))
        for order in orders(4, rng):
            host = poisoned_pool(case.layout, HOST_BLOCKS)
            run_offload(library, case, gpu, host, tokens, order)
            assert torch.equal(host, expected)


def test_the_largest_aligned_word_is_chosen() -> None:
    words = {case.name: token_geometry(case.layout, 1, 4096, 8192).word_bytes for case in CASES}
    assert words == {
        "bf16": 16, "fp16": 16, "fp32": 16, "fp8": 16, "padded": 16, "words of 4": 4, "words of 1": 1,
    }  # fmt: skip
    layout = CASES[0].layout
    assert token_geometry(layout, 1, 4096, 8192 + 4).word_bytes == 4
    assert token_geometry(layout, 1, 4096 + 1, 8192).word_bytes == 1
