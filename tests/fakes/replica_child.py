"""A replica's process around the fake engine, for ``ReplicaSet(command=COMMAND)``."""

import sys
from pathlib import Path
from typing import Any

from pipemax.api import Engine
from pipemax.config import EngineConfig
from pipemax.replicas.child import EngineFactory, main
from tests.fakes.engine import FakeEngine
from tests.fakes.settings import FakeOptions

_REPOSITORY = Path(__file__).resolve().parents[2]
# A server of the tests finds its modules by sys.path, which its children do not inherit.
_SCRIPT = f"""
import sys
sys.path[:0] = [{str(_REPOSITORY)!r}, {str(_REPOSITORY / "engine")!r}]
from tests.fakes.replica_child import run
run()
"""
COMMAND = (sys.executable, "-c", _SCRIPT)
POLICY: dict[str, Any] = {"chosen": "vllm", "reason": "a fake has no scheduler"}


def run() -> None:
    main(load_factory=_load_fake)


def _load_fake() -> EngineFactory:
    def start(config: EngineConfig) -> tuple[Engine, dict[str, Any]]:
        return FakeEngine(config), POLICY

    return EngineFactory(measures=lambda config: FakeOptions(**config.vllm["fake"]).measures, start=start)
