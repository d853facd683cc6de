"""The process in which one system is measured: ``python -m lab.bench.peers.child SYSTEM LOAD RESULT``."""

import sys
from pathlib import Path

from lab.bench.peers.load import Load
from lab.bench.peers.recorder import Recorder
from lab.bench.peers.systems import SYSTEMS, measure

if __name__ == "__main__":
    name, load_json, result = sys.argv[1:]
    load = Load.from_json(load_json)
    measure(name, load, Recorder(load, Path(result), engines=SYSTEMS[name].num_engines(load)))
