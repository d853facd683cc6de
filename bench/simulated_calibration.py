"""Write the calibration that the simulated machine would give, where no GPU was measured yet.

    python bench/simulated_calibration.py NODE MODEL [--directory conf/calibration]

NODE and MODEL are profiles: rtx5090x8 llama2-70b.
"""

import argparse
from pathlib import Path

from pipemax.control.times.calibration import calibration_path, save_calibration
from pipemax.presets import load_model, load_node
from pipemax.sim.systems.pipemax_config import simulated_calibration


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
