"""Print why an engine whose worker raises could not start.

vLLM loads no plugin here, as where PipeMax is on PYTHONPATH only. Run as a process of its own: the plugin, once loaded,
would also be in effect in forked children.
"""

from pipemax.api import OfflineEngine
from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from tests.engine.conftest import DEFAULTS

if __name__ == "__main__":
    raising = {"worker_cls": "tests.fakes.raising_worker.RaisingWorker"}
    try:
        OfflineEngine(EngineConfig.parse(DEFAULTS | {"policy": "vllm", "vllm": raising}))
    except EngineStartError as error:
        print(f"cause: {error}", flush=True)
