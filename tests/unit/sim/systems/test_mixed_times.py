"""Mixed steps, predicted from a profile that has none, against the simulated machine."""

from random import Random

import pytest

from pipemax.domain.specs import Parallelism
from pipemax.domain.step_times import mixed_step_s
from pipemax.presets import load_model, load_node, override
from pipemax.sim.stage_times import StageTimes, StepWork, prompt_pairs
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, stage_configs


@pytest.mark.parametrize(
    ("node", "model", "mixed_cost", "worst"),
    [
        ("rtx5090x8", "llama2-70b", 1.0, 0.03),
        ("l20x8", "llama2-70b", 1.0, 0.03),
        ("l20x8", "llama2-70b", 1.5, 0.045),  # the errors of what prompts add count so many times
        ("rtx5090x8", "mixtral-8x7b", 1.0, 0.08),  # its experts are read more and more as tokens are added
    ],
)
def test_mixed_steps_are_predicted_within_the_errors_of_the_fits(
    node: str, model: str, mixed_cost: float, worst: float
) -> None:
    spec, shape, rng = override(load_node(node), {"gpu.mixed_cost": mixed_cost}), load_model(model), Random(0)
    times = StageTimes(spec, shape, Parallelism(pipeline=spec.num_gpus, tensor=1))
    configs = stage_configs(spec, times, PipeMaxOptions())
    for _ in range(300):
        cap = rng.choice([128, 256, 512, 1024])
        decodes = rng.randint(1, min(cap, 300))
        prompt_tokens = rng.randint(1, cap)
        kv_tokens = decodes * rng.randint(100, 3000)
        pairs = prompt_pairs(rng.randint(0, 3000), prompt_tokens)
        work = StepWork(
            decode_requests=decodes,
            decode_context_tokens=kv_tokens,
            prefill_tokens=prompt_tokens,
            prefill_pairs=pairs,
            prefill_outputs=1,
        )
        for config, seconds in zip(configs, times.stage_s(work), strict=True):
            predicted_s = mixed_step_s(
                config.decode_time,
                config.prefill_time,
                num_decodes=decodes,
                kv_tokens=kv_tokens,
                prompt_tokens=prompt_tokens,
                token_pairs=round(pairs),
                mixed_scales=config.mixed_scales,
            )
            assert predicted_s == pytest.approx(seconds, rel=worst), work
