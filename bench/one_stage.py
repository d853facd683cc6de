"""One pipeline stage of eight: PipeMax against static prefetch, no prefetch and a layer-first pool, on one GPU.

    python bench/one_stage.py [--json FILE] [--plot FILE] [--policies NAME ...] [--steps N] [--host-gib GIB]

Ten layers of LLaMA-2-70B with dummy weights in bf16, the KV pool that eight 32 GB cards have, eight batches in
rotation, ShareGPT-like lengths. The real controller decides, and the copies are real. Attention is our Triton kernel
(``bench/stage/attention.py``). The other seven stages are assumed to take as long as this one, so tokens/s are those of
a balanced pipeline. Prompts are booked, not computed: the policies differ in decode. First the decode times of the
stage are profiled, as ``pipemax calibrate`` does; the estimator's error is against that profile as it refines itself.
``--predict`` runs the simulator with the profile and the copy rate, and compares step time and tokens/s.

Needs a CUDA GPU with about 40 GB, and host memory for ``--host-gib``.
"""

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.stage.attention import KERNEL_NAME
from bench.stage.driver import Run
from bench.stage.experiment import POLICIES, Experiment, Outcome, Setup, as_json
from bench.stage.prediction import Prediction, predict
from bench.stage.tables import at_least_one, environment, print_table, require_cuda, write_json
from lab.paper.lengths import open_workload
from lab.paper.plots import plot_decode
from pipemax.domain.specs import Parallelism, kv_capacity
from pipemax.domain.units import GIB
from pipemax.presets import load_model, load_node
from pipemax.sim.result import DecodeSample

NUM_STAGES = 8
BLOCK_TOKENS = 16


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="also write everything, each decode step included, as JSON, after each policy",
    )
    parser.add_argument("--plot", type=Path, help="draw PipeMax's step times and KV over the run (PNG)")
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="what to run (default all)"
    )
    parser.add_argument(
        "--steps", type=at_least_one, default=400, help="decode steps of each policy (default 400)"
    )
    parser.add_argument("--warm-up", type=int, default=100, help="of these, not counted (default 100)")
    parser.add_argument("--host-gib", type=float, default=48.0, help="host KV pool in GiB (default 48)")
    parser.add_argument(
        "--predict",
        nargs="*",
        choices=POLICIES,
        default=["pipemax"],
        help="also simulate these with the measured stage (default pipemax; a minute of CPU each)",
    )
    parser.add_argument("--requests", type=at_least_one, default=6000, help="of the workload (default 6000)")
    options = parser.parse_args(arguments)
    if options.warm_up >= options.steps:
        parser.error(f"--warm-up {options.warm_up} leaves none of --steps {options.steps} to count")
    return options


def make_setup(options: argparse.Namespace, device: torch.device) -> Setup:
    """Return the setup of a stage of the paper's node: its layers and its GPU pool, and the host pool asked for."""
    node, model = load_node("rtx5090x8"), load_model("llama2-70b")
    pipeline = Parallelism(pipeline=NUM_STAGES, tensor=1)
    num_layers = pipeline.layers_of(model)[1]
    block_bytes = BLOCK_TOKENS * num_layers * model.kv_bytes_per_token_and_layer
    return Setup(
        model=model,
        num_layers=num_layers,
        num_stages=NUM_STAGES,
        device=device,
        dtype=torch.bfloat16,
        gpu_blocks=kv_capacity(node, model, pipeline, block_tokens=BLOCK_TOKENS).gpu_blocks,
        host_blocks=int(options.host_gib * GIB) // block_bytes,
        block_tokens=BLOCK_TOKENS,
        decode_steps=options.steps,
        warm_up_steps=options.warm_up,
    )


def decode_samples(run: Run, block_tokens: int) -> list[DecodeSample]:
    """Return a run's decode steps as the simulator records them, for the same plot."""
    time_s, samples = 0.0, []
    for step in run.steps:
        time_s += step.begin_to_begin_s
        samples.append(
            DecodeSample(
                time_s=time_s,
                step_s=step.begin_to_begin_s,
                batch=step.batch,
                kv_tokens=step.kv_tokens,
                prefetched_tokens=step.prefetched_blocks * block_tokens,
            )
        )
    return samples


@dataclass(slots=True, kw_only=True)
class Results:
    """The results of all policies that ran."""

    outcomes: list[Outcome] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    """For the JSON: each outcome with its decode steps and what the controller was told of the stage."""


def measure(
    experiment: Experiment,
    policies: list[str],
    predicted: list[str],
    plot: Path | None,
    on_policy: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Run, print and draw one policy after the other; ``on_policy`` gets all results so far after each."""
    results, setup = Results(), experiment.setup
    for policy in policies:
        outcome, run, stage = experiment.run(policy)
        results.outcomes.append(outcome)
        results.details.append({**as_json(outcome, run), "stage": asdict(stage)})
        print_table(policy, [outcome])
        if policy in predicted:
            results.predictions.append(predict(setup, stage, experiment.workload, outcome))
            print_table(f"{policy}, simulated with this stage", results.predictions[-1:])
        if policy == "pipemax" and plot is not None:
            plot_decode(decode_samples(run, setup.block_tokens), setup.gpu_blocks * setup.block_tokens, plot)
        on_policy(results)
    return results


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # for the host pool's start time
    device = require_cuda("bench/one_stage.py")
    experiment = Experiment(make_setup(options, device), open_workload("sharegpt", options.requests))
    measured_on = environment(device, ["python", "bench/one_stage.py", *arguments])
    print(f"{measured_on}\nattention: {KERNEL_NAME}\n{experiment.setup}")

    def save(results: Results) -> None:
        if options.json:
            sections = {
                "attention": KERNEL_NAME,
                "profile": [asdict(row) for row in experiment.profile],
                "policies": results.details,
                "predictions": [asdict(prediction) for prediction in results.predictions],
            }
            write_json(options.json, measured_on, sections)

    results = measure(experiment, options.policies, options.predict, options.plot, save)
    print_table("All policies", results.outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
