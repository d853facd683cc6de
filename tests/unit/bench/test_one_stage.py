"""The one-stage harness at a size for CPUs: real controller, real copies, every policy; pools full of NaN."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import one_stage
from bench.stage.driver import StageDriver
from bench.stage.experiment import POLICIES, Experiment, OpenTransfers, Outcome, Setup
from bench.stage.pools import PoolPlan
from bench.stage.prediction import compare, counted_samples
from bench.stage.tables import environment, write_json
from pipemax.control.controller_config import StageConfig
from pipemax.domain.specs import KvLayout
from pipemax.domain.step_times import StepTimeModel
from pipemax.sim.result import DecodeSample
from pipemax.sim.workloads import Workload
from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.commands import StepCopies, StepWait
from tests.unit.bench.test_stage_model import TINY

SETUP = Setup(
    model=TINY,
    num_layers=2,
    num_stages=4,
    device=torch.device("cpu"),
    dtype=torch.float32,
    gpu_blocks=48,
    host_blocks=240,
    block_tokens=4,
    decode_steps=60,
    warm_up_steps=10,
    profile_batches=(1, 8),
    profile_contexts=(4, 16),
    profile_repeats=1,
    computes_prefill=True,
)


def workload(num_requests: int) -> Workload:
    rng = np.random.default_rng(0)
    return Workload(
        name="test",
        prompt_tokens=rng.integers(3, 14, num_requests),
        output_tokens=rng.integers(8, 30, num_requests),
        shared_prefix_tokens=0,
    )


class Poisoned(Experiment):
    """Nothing is in the GPU pool that was not computed or prefetched; every replica is compared at the end."""

    num_compared = 0

    def prepare(self, gpu_rows: torch.Tensor) -> None:
        gpu_rows.fill_(0xFF)

    def check(self, driver: StageDriver, plan: PoolPlan, gpu_rows, host_rows, transfers) -> None:
        transfers.close()
        assert driver.last_hidden is not None
        assert driver.last_hidden.isfinite().all()
        views = [plan.layer_views(gpu_rows, plan.gpu_blocks, torch.float32)]
        views.append(plan.layer_views(host_rows, plan.host_blocks, torch.float32))
        for gpu, host in zip(*views, strict=True):
            for request_id, held in driver.books.held.items():
                if not driver.books.is_whole(request_id):
                    continue  # the run has ended in the midst of its prefetch
                whole = min(held.num_tokens // plan.block.block_tokens, len(held.gpu))
                assert torch.equal(gpu[held.gpu[:whole]], host[held.host[:whole]])
                self.num_compared += whole


class Lossy:
    """Transfers that lose a prefetch now and then."""

    def __init__(self, inner: StepTransfers) -> None:
        self._inner = inner

    def begin_step(self, copies: StepCopies) -> StepWait:
        return self._inner.begin_step(copies)

    def start_prefetches(self, copies: StepCopies) -> None:
        self._inner.start_prefetches(replace(copies, prefetches=copies.prefetches[1:] or copies.prefetches))

    def end_step(self, copies: StepCopies) -> None:
        self._inner.end_step(copies)

    def close(self) -> None:
        self._inner.close()


class LossyExperiment(Poisoned):
    def open_transfers(self, plan: PoolPlan, gpu_rows: torch.Tensor) -> OpenTransfers:
        @contextmanager
        def lossy() -> Iterator[tuple[StepTransfers, torch.Tensor | None]]:
            with super(LossyExperiment, self).open_transfers(plan, gpu_rows) as (transfers, host_rows):
                yield Lossy(transfers), host_rows

        return lossy()


def test_a_lost_prefetch_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        LossyExperiment(SETUP, workload(120)).run("pipemax")


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_decodes_on_kv_that_is_whole(policy: str) -> None:
    experiment = Poisoned(SETUP, workload(120))
    if policy == "none":
        experiment.check = lambda *_: None  # type: ignore[method-assign]  # it keeps no replica
    outcome, run, stage = experiment.run(policy)
    assert outcome.steps == 50
    assert stage.h2d_bytes_per_s > 0
    assert run.num_prefill_steps > 0
    assert outcome.tokens_per_s > 0
    if policy == "none":
        assert outcome.prefetched_blocks == 0
        assert not run.prefetches
    else:
        assert outcome.prefetched_blocks > 0
        assert experiment.num_compared > 0
        assert run.prefetches


class NoisyProfile(Poisoned):
    """Its profile fell from one request to eight: of larger batches it says that they take less than no time."""

    def _stage_config(self, plan: PoolPlan, kv: list[torch.Tensor], transfers: StepTransfers) -> StageConfig:
        falling = StepTimeModel.linear(alpha_s=-1e-3, beta_s=0.0, delta_s=4e-3)
        return replace(super()._stage_config(plan, kv, transfers), decode_time=falling)


def test_a_profile_that_falls_plans_no_negative_copies() -> None:
    outcome, run, _ = NoisyProfile(SETUP, workload(120)).run("pipemax")
    assert outcome.steps == 50
    assert all(step.prefetched_blocks >= 0 for step in run.steps)


OUTCOME = Outcome(
    policy="pipemax",
    steps=3,
    mean_batch=20.0,
    step_ms=100.0,
    compute_ms=90.0,
    host_ms=1.0,
    tokens_per_s=200.0,
    prefetched_blocks=1.0,
    stall_share=0.1,
    h2d_gb_per_s=1.0,
    within_5_percent=1.0,
    worst_error=0.0,
    most_batch=30,
    least_free_gpu_blocks=0,
)


class TestCommand:
    def test_without_a_gpu_it_says_so_in_one_sentence(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA GPU")
        with pytest.raises(SystemExit, match=r"needs a CUDA device, and torch .* finds none: run it where"):
            one_stage.main([])

    def test_settings_that_leave_nothing_to_measure_are_refused(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for arguments, message in (
            (["--steps", "100"], "--warm-up 100 leaves none of --steps 100 to count"),
            (["--requests", "0"], "0 is less than 1"),
        ):
            with pytest.raises(SystemExit):
                one_stage.parse(arguments)
            assert message in capsys.readouterr().err

    def test_the_stage_is_that_of_the_papers_node(self) -> None:
        options = one_stage.parse(["--host-gib", "48"])
        setup = one_stage.make_setup(options, torch.device("cpu"))
        assert setup.num_layers == 10
        assert setup.pools(KvLayout.BLOCK_FIRST).block.block_bytes == 655_360
        assert 17_000 < setup.gpu_blocks < 18_500
        assert setup.host_blocks == 78_643

    def test_the_bench_writes_figures_picture_and_json(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        experiment = Experiment(SETUP, workload(120))
        saved: list[int] = []
        results = one_stage.measure(
            experiment,
            ["pipemax"],
            ["pipemax"],
            tmp_path / "a.png",
            lambda results: saved.append(len(results.details)),
        )
        assert saved == [1], "written after each policy"
        assert (tmp_path / "a.png").stat().st_size > 1000
        assert "| policy | steps | mean_batch | step_ms |" in capsys.readouterr().out
        write_json(tmp_path / "a.json", environment(SETUP.device, ["x"]), {"policies": results.details})
        document = json.loads((tmp_path / "a.json").read_text())
        assert document["measured_on"]["device"] == "CPU"
        (policy,) = document["policies"]
        assert policy["mean_batch"] == results.outcomes[0].mean_batch
        assert len(policy["decode_steps"]) == SETUP.decode_steps
        # layers, kv_heads, keys and values, head_dim, float32
        assert policy["stage"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
        (prediction,) = results.predictions
        assert prediction.tokens_per_s > 0
        # The same controller over the same lengths: batches differ by what times differ, no more.
        assert prediction.mean_batch == pytest.approx(results.outcomes[0].mean_batch, rel=0.5)

    def test_a_prediction_is_compared_over_the_counted_steps(self) -> None:
        setup = replace(SETUP, warm_up_steps=2, decode_steps=5)
        samples = [
            DecodeSample(time_s=t, step_s=0.0, batch=b, kv_tokens=0, prefetched_tokens=0)
            for t, b in ((0.0, 99), (1.0, 99), (2.0, 10), (2.1, 20), (2.2, 30), (9.0, 99))
        ]
        outcome = replace(OUTCOME, step_ms=125.0, tokens_per_s=160.0)
        prediction = compare(outcome, counted_samples(samples, setup))
        assert prediction.mean_batch == 20
        assert prediction.step_ms == pytest.approx(100)
        assert prediction.step_error == pytest.approx(-0.2)
        assert prediction.tokens_error == pytest.approx(0.25)
        with pytest.raises(ValueError, match="1 decode steps: too few to compare"):
            counted_samples(samples[:1], setup)

    def test_too_few_requests_are_refused_with_the_numbers(self) -> None:
        setup = replace(SETUP, decode_steps=2000, warm_up_steps=1500)
        with pytest.raises(ValueError, match=r"ended after \d+ decode steps, before the warm-up of 1500"):
            Experiment(setup, workload(8)).run("pipemax")
