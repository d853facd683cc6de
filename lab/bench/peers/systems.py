"""The compared systems by name: where the code of each is, and the environment in which it runs."""

from dataclasses import dataclass
from importlib import import_module

from lab.bench.peers.load import Load
from lab.bench.peers.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class System:
    """One line of the table."""

    module: str
    """A module under ``lab.bench.peers`` with a function of the system's name: ``(Load, Recorder) -> None``."""
    about: str
    is_peer: bool = False
    """Whether it needs packages of ``requirements/peers.lock``."""
    engine_per_core: bool = False

    def num_engines(self, load: Load) -> int:
        return len(load.cores) if self.engine_per_core else 1


SYSTEMS = {
    "bare_engine": System(
        module="engines", about="PipeMax's engine as a library, all rows at once, no Spark"
    ),
    "pipemax_spark": System(
        module="on_spark", about="PipeMax on Spark: annotate(), two slots, one engine server"
    ),
    "vllm_generate": System(module="engines", about="stock vLLM, LLM.generate with all rows, no Spark"),
    "vllm_run_batch": System(module="engines", about="vllm run-batch's code on a JSON-lines file, no Spark"),
    "plain_udf_one_engine": System(module="on_spark", about="mapInArrow, LLM.generate per batch, one worker"),
    "plain_udf_pinned_engines": System(
        module="on_spark", about="the same with a worker and a pinned engine per core", engine_per_core=True
    ),
    "ray_data_llm": System(module="ray_data", about="Ray Data LLM 2.60.0", is_peer=True),
    "distribatch": System(module="on_spark", about="distribatch 0.1.0a1 on Spark", is_peer=True),
}


def measure(name: str, load: Load, recorder: Recorder) -> None:
    """Measure a system in this process, whose interpreter must have what the system needs."""
    getattr(import_module(f"lab.bench.peers.{SYSTEMS[name].module}"), name)(load, recorder)
