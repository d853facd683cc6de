"""A process that measures one replica has its part of the machine."""

import subprocess
import sys

from pipemax.config import EngineConfig
from pipemax.replicas.one_replica import as_first_replica

IN_ITS_PLACE = """
import os
from pipemax.config import EngineConfig
from pipemax.replicas.one_replica import as_first_replica

before = len(os.sched_getaffinity(0))
config = as_first_replica(EngineConfig(model="any", replicas=2, cpu_kv_gib=3.0))
assert len(os.sched_getaffinity(0)) == max(1, before // 2), os.sched_getaffinity(0)
assert (config.replicas, config.cpu_kv_gib) == (None, 1.5), config
print("done")
"""


def test_the_first_replicas_place_is_its_cores_and_memory() -> None:
    ran = subprocess.run([sys.executable, "-c", IN_ITS_PLACE], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "done\n", ran.stderr


def test_without_replicas_nothing_changes() -> None:
    config = EngineConfig(model="any")
    assert as_first_replica(config) is config
