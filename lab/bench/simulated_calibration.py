"""Write the calibration that the simulated machine would give, for GPUs that were not measured yet.

    python lab/bench/simulated_calibration.py NODE MODEL [--directory conf/calibration]

NODE and MODEL are profiles: rtx5090x8 llama2-70b.
"""

import argparse
import re
from pathlib import Path

from pipemax.control.times.calibration import Calibration, save_calibration
from pipemax.domain.specs import ModelSpec, NodeSpec, Parallelism
from pipemax.presets import load_model, load_node
from pipemax.sim.stage_times import StageTimes
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, stage_configs


def simulated_calibration(node: NodeSpec, model: ModelSpec) -> Calibration:
    """Return what ``pipemax check-node`` would write on the simulated machine, with one stage per GPU."""
    times = StageTimes(node, model, Parallelism(pipeline=node.num_gpus, tensor=1))
    return Calibration(
        device=node.gpu.name,
        model=model.name,
        measured=f"Not measured: fitted to the simulator's stage times for the node profile {node.name}.",
        stages=stage_configs(node, times, PipeMaxOptions()),
    )


def calibration_path(directory: Path, device: str, model: str) -> Path:
    """Return the path of the calibration of this device and model, whether or not it exists."""
    slug = "--".join(re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") for name in (device, model))
    return directory / f"{slug}.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("node")
    parser.add_argument("model")
    parser.add_argument("--directory", type=Path, default=Path("conf/calibration"))
    arguments = parser.parse_args()
    calibration = simulated_calibration(load_node(arguments.node), load_model(arguments.model))
    path = calibration_path(arguments.directory, calibration.device, calibration.model)
    save_calibration(path, calibration)
    print(path)


if __name__ == "__main__":
    main()
