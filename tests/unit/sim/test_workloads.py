"""Lengths meet the paper's table."""

import numpy as np
import pytest

from pipemax.domain.workload import LengthStatistics, WorkloadSpec
from pipemax.presets import load_workload
from pipemax.sim.workloads import draw_workload


@pytest.mark.parametrize(("num_requests", "seed"), [(500, 1), (5000, 0)])
@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("sharegpt", (343.76, 148.0), (237.20, 152.0)), ("longbench", (2686.89, 2736.5), (101.78, 19.0))],
)
def test_means_and_medians_are_the_papers_after_the_context_cut(
    name: str, prompt: tuple[float, float], output: tuple[float, float], num_requests: int, seed: int
) -> None:
    workload = draw_workload(load_workload(name), num_requests, np.random.default_rng(seed))
    for lengths, (mean, median) in ((workload.prompt_tokens, prompt), (workload.output_tokens, output)):
        assert lengths.mean() == pytest.approx(mean, rel=0.03)
        assert np.median(lengths) == pytest.approx(median, rel=0.03)
    assert (workload.prompt_tokens + workload.output_tokens).max() <= 4096
    assert workload.output_tokens.min() >= 1


def test_the_same_seed_draws_the_same_lengths() -> None:
    spec = load_workload("sharegpt")
    first, again, other = (draw_workload(spec, 100, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert (first.prompt_tokens == again.prompt_tokens).all()
    assert (first.prompt_tokens != other.prompt_tokens).any()


def test_templated_prompts_exceed_their_shared_prefix() -> None:
    workload = draw_workload(load_workload("templated"), 500, np.random.default_rng(0))
    assert workload.prompt_tokens.min() > workload.shared_prefix_tokens == 512


def test_statistics_that_no_lengths_have_are_refused() -> None:
    impossible = LengthStatistics(family="lognormal", mean=100.0, median=900.0, least=1, most=1000)
    possible = LengthStatistics(family="lognormal", mean=100.0, median=60.0, least=1, most=1000)
    spec = WorkloadSpec(
        name="odd", prompt=impossible, output=possible, context_tokens=4096, shared_prefix_tokens=0
    )
    with pytest.raises(ValueError, match="have mean 100"):
        draw_workload(spec, 1000, np.random.default_rng(0))
