"""Compare PipeMax's tokens with stock vLLM's, on one GPU.

    python -m lab.gpu.parity --out DIR [--seconds S]

All engines run the same 64 prompts through vLLM's batch-invariant kernels (``VLLM_BATCH_INVARIANT=1``), under which
tokens do not depend on the batch: two engines of stock vLLM with different batches are the control. PipeMax's GPU pool
holds 3,072 tokens, so every row leaves the GPU many times. Two engines with a planted fault show that a wrong copy is
seen. Engines of one wave run at the same time:

    first wave      FLASH_ATTN: stock vLLM twice, PipeMax, PipeMax with `waves: on`, and with each fault
    second wave     TRITON_ATTN: stock vLLM and PipeMax, on one stage, and on two stages over gloo

The model is random and varied (``tests/parity/make_model.py``), with 16 KiB of KV a token.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lab.gpu.drive import Drive, Round, drive, read_rounds
from lab.gpu.models import BLOCK_TOKENS, KERNELS, graphs
from lab.gpu.side_by_side import (
    GPU_MODULES,
    Job,
    begin_run,
    ended_by_sigterm,
    preload,
    run_together,
)
from lab.gpu.tables import print_table
from lab.gpu.tokens import Comparison, Tokens, compare, verdict

SHAPES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
KV_BYTES_PER_TOKEN = 16_384
NUM_ROWS = 64
STOCK = {"policy": "vllm", "max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 8192}
STOCK_KV_BYTES = 40_000 * KV_BYTES_PER_TOKEN
"""All rows fit: stock vLLM drops no KV."""
PIPEMAX = {
    "policy": "pipemax",
    "check_at_start": False,
    "num_batches": 3,
    "host_kv_gib": 1,
    "calibrate_at_start_s": 2,
    "batching": "separated",
    "max_num_seqs": NUM_ROWS,
    "max_num_batched_tokens": 2048,
}
PIPEMAX_KV_BYTES = 3_072 * KV_BYTES_PER_TOKEN
WAVE_S = 110.0
"""Maximum of a wave. An H100 takes 63 and 39 s."""
ROUND_S = 60.0

_FAULTY = "lab.gpu.faulty.FaultyWorker"
TWO_STAGES = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V2 runner sends more between stages than one_gpu replaces
    "VLLM_DISABLE_PYNCCL": "1",  # NCCL refuses two ranks on a GPU
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    drives: dict[str, Drive]
    environments: dict[str, dict[str, str]]
    comparisons: Sequence[tuple[str, str, str]]
    """Round, the round that it is compared with, and what for (``tokens.Comparison.kind``)."""


def lengths() -> list[tuple[int, int]]:
    rng = Random(2)
    return [(rng.randint(40, 200), rng.randint(64, 96)) for _ in range(NUM_ROWS)]


class Configs:
    """The engine configs of one attention backend, as fields."""

    def __init__(self, model: Path, backend: str) -> None:
        self._model = str(model)
        self._vllm = {"attention_backend": backend, "kernel_config": KERNELS}

    def stock(self, **changes: Any) -> dict[str, Any]:
        return self._fields(STOCK | changes, {"kv_cache_memory_bytes": STOCK_KV_BYTES})

    def pipemax(self, **vllm: Any) -> dict[str, Any]:
        return self._fields(PIPEMAX, {"kv_cache_memory_bytes": PIPEMAX_KV_BYTES, **vllm})

    def behind(self, **vllm: Any) -> dict[str, Any]:
        """Return the config of PipeMax that overwrites KV behind the computation, without CUDA graphs."""
        fields = {"num_batches": 2, "waves": "on", "enforce_eager": True}
        kv_bytes = {"kv_cache_memory_bytes": PIPEMAX_KV_BYTES}
        fields = self._fields(PIPEMAX | fields, kv_bytes | vllm)
        del fields["vllm"]["compilation_config"]
        return fields

    def two_stages(self, *, is_pipemax: bool) -> dict[str, Any]:
        """Return the config of two stages on one GPU, without CUDA graphs."""
        kv_bytes = PIPEMAX_KV_BYTES if is_pipemax else STOCK_KV_BYTES
        vllm = {
            "kv_cache_memory_bytes": kv_bytes // 2,  # of each stage, which has half of the layers
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "worker_cls": f"lab.gpu.one_gpu.{'OneGpuWorker' if is_pipemax else 'OneGpuStockWorker'}",
        }
        fields = self._fields((PIPEMAX if is_pipemax else STOCK) | {"enforce_eager": True}, vllm)
        # The layout would be refused at the top: this machine has one GPU.
        del fields["pipeline_parallel_size"], fields["vllm"]["compilation_config"]
        return fields

    def _fields(self, fields: dict[str, Any], vllm: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self._model,
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "block_size": BLOCK_TOKENS,
            "gpu_memory_utilization": 0.1,
            "chat": "never",
            "enable_prefix_caching": False,
            "pipeline_parallel_size": 1,
            **fields,
            "vllm": self._vllm | {"compilation_config": graphs(1, 2, 4, 8, 16, 32, 64)} | vllm,
        }


def waves(model: Path, out: Path) -> list[Wave]:
    """Return what runs, and what is compared after each wave."""
    queue = (Round(limit_s=ROUND_S),)
    separated = Round(limit_s=ROUND_S, batching="separated")
    both = (separated, Round(limit_s=ROUND_S, batching="mixed", step_tokens=512))

    def planned(name: str, config: dict[str, Any], rounds: Sequence[Round]) -> Drive:
        return Drive(
            config=config,
            lengths=lengths(),
            rounds=rounds,
            results=out / f"{name}.json",
            num_warm_up=8,
            keeps_tokens=True,
        )

    flash, triton = Configs(model, "FLASH_ATTN"), Configs(model, "TRITON_ATTN")
    faulty = flash.pipemax(worker_cls=_FAULTY)
    first = {
        "flash_stock": planned("flash_stock", flash.stock(), queue),
        "flash_stock_few": planned(
            "flash_stock_few", flash.stock(max_num_seqs=7, max_num_batched_tokens=128), queue
        ),
        "flash_pipemax": planned("flash_pipemax", flash.pipemax(), both),
        "flash_behind": planned("flash_behind", flash.behind(), both),
        "flash_early": planned("flash_early", flash.behind(worker_cls=_FAULTY), (separated,)),
        "flash_swap": planned("flash_swap", faulty, (separated,)),
        "flash_drop_store": planned("flash_drop_store", faulty, (separated,)),
    }
    second = {
        "triton_stock": planned("triton_stock", triton.stock(), queue),
        "triton_pipemax": planned("triton_pipemax", triton.pipemax(), both),
        "two_stages_stock": planned("two_stages_stock", triton.two_stages(is_pipemax=False), queue),
        "two_stages_pipemax": planned("two_stages_pipemax", triton.two_stages(is_pipemax=True), both),
    }
    faults = {
        "flash_early": {"FAULT": "early", "FAULT_EVERY": "1"},
        "flash_swap": {"FAULT": "swap", "FAULT_EVERY": "10"},
        "flash_drop_store": {"FAULT": "drop_store", "FAULT_EVERY": "40"},
    }
    return [
        Wave(
            drives=first,
            environments=faults,
            comparisons=[
                ("flash_stock_few.queue", "flash_stock.queue", "control"),
                *_both("flash_pipemax", "flash_stock.queue"),
                *_both("flash_behind", "flash_stock.queue"),
                ("flash_early.separated", "flash_stock.queue", "planted fault"),
                ("flash_swap.separated", "flash_stock.queue", "planted fault"),
                ("flash_drop_store.separated", "flash_stock.queue", "planted fault"),
            ],
        ),
        Wave(
            drives=second,
            environments=dict.fromkeys(("two_stages_stock", "two_stages_pipemax"), TWO_STAGES),
            comparisons=[
                *_both("triton_pipemax", "triton_stock.queue"),
                *_both("two_stages_pipemax", "two_stages_stock.queue"),
                ("two_stages_stock.queue", "triton_stock.queue", "across"),
                ("triton_stock.queue", "flash_stock.queue", "across"),  # two kernels may differ
            ],
        ),
    ]


def _both(name: str, against: str) -> list[tuple[str, str, str]]:
    return [(f"{name}.{batching}", against, "PipeMax") for batching in ("separated", "mixed")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What a round of PipeMax moved."""

    round: str
    rows: int
    errors: int
    evictions: float
    overwrites: float
    """Evictions in a wave."""
    prefetches: float
    prefetched_blocks: float
    stored_mb: float
    recomputes: float


def copies_of(name: str, figures: dict[str, Any]) -> Copies:
    moved = ("evictions", "overwrites", "prefetches", "prefetched_blocks", "recomputes")
    return Copies(
        round=name,
        rows=figures["rows"],
        errors=len(figures["errors"]),
        stored_mb=figures["stored_bytes"] / 1e6,
        **{field: figures[field] for field in moved},
    )


def run_wave(wave: Wave, out: Path, rounds: dict[str, Tokens], *, limit_s: float) -> list[Comparison]:
    """Run a wave's engines, add their tokens to ``rounds``, print and return its comparisons."""
    jobs = [
        Job(name=name, work=lambda plan=plan: drive(plan), environment=wave.environments.get(name, {}))
        for name, plan in wave.drives.items()
    ]
    for end in run_together(jobs, out, limit_s=limit_s):
        print(f"{end.name}: {end.result} after {end.seconds:.0f} s", flush=True)
    moved = []
    for name, plan in wave.drives.items():
        for figures in read_rounds(plan.results):
            rounds[f"{name}.{figures['round']}"] = figures["tokens"]
            if plan.config["policy"] == "pipemax":
                moved.append(copies_of(f"{name}.{figures['round']}", figures))
    compared = [compare(mine, against, rounds, kind=kind) for mine, against, kind in wave.comparisons]
    title = " and ".join(
        sorted({str(plan.config["vllm"]["attention_backend"]) for plan in wave.drives.values()})
    )
    print_table(f"tokens: {title}", compared)
    if moved:
        print_table(f"copies: {title}", moved)
    return compared


def make_parity_model(directory: Path) -> None:
    from tests.parity.make_model import make_model

    make_model(directory, SHAPES)


def main(arguments: Sequence[str]) -> int:
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    limits = begin_run(__doc__, arguments)
    compared: list[Comparison] = []
    rounds: dict[str, Tokens] = {}
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="pipemax-parity-") as model:
        preload(GPU_MODULES)
        # In a process of its own: torch's threads on the CPU would not survive the forks that follow.
        make = Job(name="model", work=lambda: make_parity_model(Path(model)))
        run_together([make], limits.out, limit_s=60.0)
        for wave in waves(Path(model), limits.out):
            left_s = limits.deadline_s - time.monotonic()
            compared += run_wave(wave, limits.out, rounds, limit_s=min(WAVE_S, left_s))
    print(f"\n{verdict(compared)}", flush=True)
    return 0 if verdict(compared).startswith("PARITY PASSED") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
