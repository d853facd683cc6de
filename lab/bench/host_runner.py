"""vLLM's V2 model runner in this process, without a GPU: its host's work only, for ``lab/bench/worker_step.py``.

Kernels are not launched, the model computes nothing, and no attention metadata is made. Everything else of a worker's
step runs: PipeMax's worker and connector, vLLM's runner, sampler and states. A process that runs it must begin with
``runner_environment``, since vLLM looks for Triton when it is imported.
"""

import os
import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import vllm.v1.worker.gpu
import vllm.v1.worker.gpu.model_runner as vllm_runner
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from lab.virtual_node.launch import write_model_config
from pipemax.config import EngineConfig
from pipemax.presets import load_model
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from tests.fakes.vllm_kinds import asynchronous_scheduling_on_cpu, runner_version
from tests.parity.make_model import make_tokenizer

BLOCK_TOKENS = 32
"""vLLM's attention on CPUs takes multiples of it."""
VOCABULARY = 512
_HIDDEN = 64


def runner_environment() -> dict[str, str]:
    """Return this process's environment with what has vLLM find Triton without a GPU."""
    with runner_version(2):
        return dict(os.environ)


class Kernel:
    """Stands for a kernel of Triton: counts its launches."""

    num_launches = 0

    def __getitem__(self, grid: Any) -> "Kernel":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        Kernel.num_launches += 1


class _Model:
    """Returns hidden states and logits of the right shapes, which take no time to make."""

    def __init__(self, num_tokens: int) -> None:
        self._hidden = torch.zeros(num_tokens, _HIDDEN)
        self._logits = torch.zeros(num_tokens, VOCABULARY)

    def __call__(self, positions: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return self._hidden[: len(positions)]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden_states)]

    def modules(self) -> Iterator[Any]:
        """Return none, for vLLM's clearing of caches at the end."""
        return iter(())


@contextmanager
def host_runner(*, num_slots: int, max_model_len: int) -> Iterator[Any]:
    """Start a worker of one stage under PipeMax in this process; yield its runner."""
    torch.set_num_threads(1)
    _skip_kernels()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="pipemax-host-runner-")))
        shapes: dict[str, int] = {
            "num_layers": 1,
            "hidden_size": _HIDDEN,
            "ffn_size": _HIDDEN,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 32,
            "vocab_size": VOCABULARY,
        }
        write_model_config(
            replace(load_model("llama2-70b"), **shapes), directory, max_model_len=max_model_len
        )
        make_tokenizer().save_pretrained(directory)
        config = EngineConfig.parse(
            {
                "model": str(directory),
                "policy": "pipemax",
                "dtype": "float32",
                "max_model_len": max_model_len,
                "max_num_seqs": num_slots,
                "max_num_batched_tokens": max(num_slots, 1024),
                "block_size": BLOCK_TOKENS,
                "cpu_kv_gib": 0.25,
                "host_kv_gib": 0.1,
                "vllm": {
                    "load_format": "dummy",
                    "num_gpu_blocks_override": 2 * max_model_len // BLOCK_TOKENS,
                },
            }
        )
        for context in (launch_environment(config), runner_version(2), asynchronous_scheduling_on_cpu()):
            stack.enter_context(context)
        core = EngineCore(make_vllm_config(config), UniProcExecutor, log_stats=False)
        stack.callback(core.shutdown)
        executor: Any = core.model_executor
        runner = executor.driver_worker.worker.model_runner
        runner.model = _Model(runner.max_num_tokens)
        runner.model_state.prepare_attn = lambda *args, **kwargs: {}
        yield runner


def _skip_kernels() -> None:
    combine = vllm_runner.combine_sampled_and_draft_tokens
    # Its kernel writes which hidden states are sampled from: here, unwritten, they would be anything.
    vllm_runner.combine_sampled_and_draft_tokens = lambda *args, **kwargs: combine(*args, **kwargs).zero_()
    for module_info in pkgutil.walk_packages(vllm.v1.worker.gpu.__path__, "vllm.v1.worker.gpu."):
        try:
            module = import_module(module_info.name)
        except ImportError:  # of hardware or libraries that are not here
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, InterpretedFunction):
                setattr(module, name, Kernel())
