"""Print why an engine failed: one whose worker raises, or one whose core is killed.

vLLM loads no plugin here, as where PipeMax is on PYTHONPATH only. Run as a process of its own: the plugin, once loaded,
would also be in effect in forked children.
"""

import multiprocessing
import os
import signal
import sys

from pipemax.api import GenerationRequest, OfflineEngine
from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineDiedError, EngineStartError
from tests.engine.conftest import DEFAULTS


def fail_at_start() -> None:
    raising = {"worker_cls": "tests.fakes.raising_worker.RaisingWorker"}
    try:
        OfflineEngine(EngineConfig.parse(DEFAULTS | {"policy": "vllm", "vllm": raising}))
    except EngineStartError as error:
        print(f"cause: {error}", flush=True)


def die_by_a_kill() -> None:
    with OfflineEngine(EngineConfig.parse(DEFAULTS | {"policy": "vllm"})) as engine:
        (core,) = [child for child in multiprocessing.active_children() if child.name == "EngineCore"]
        os.kill(core.pid or 0, signal.SIGKILL)
        engine.submit([GenerationRequest(request_id="1", prompt="Package: x")])
        try:
            while True:
                engine.poll(timeout_s=1.0)
        except EngineDiedError as error:
            print(f"cause: {error}", flush=True)


if __name__ == "__main__":
    {"raises": fail_at_start, "is killed": die_by_a_kill}[sys.argv[1]]()
