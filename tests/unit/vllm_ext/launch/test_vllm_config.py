"""From a config to vLLM's arguments, without starting anything."""

import importlib
import logging
import os
from pathlib import Path

import pytest
from vllm.config import SchedulerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from pipemax.config import EngineConfig, Policy
from pipemax.control.controller_config import StageConfig
from pipemax.domain.plan import Batching
from pipemax.domain.step_times import StepTimeModel
from pipemax.node.lifetime import end_with_server
from pipemax.vllm_ext.launch import tunable_scheduler
from pipemax.vllm_ext.launch.engine_room import admission_capacity_tokens, real_max_num_seqs
from pipemax.vllm_ext.launch.forecast import forecast, runtime_settings
from pipemax.vllm_ext.launch.vllm_config import (
    _cores_of_workers,
    _pipemax_args,
    engine_args,
    launch_environment,
    make_vllm_config,
)
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.seam import version
from tests.fakes.vllm_kinds import asynchronous_scheduling_on_cpu, runner_version
from tests.unit.vllm_ext.launch.demo_config import DEMO_MODEL


def config(**values: object) -> EngineConfig:
    return EngineConfig.parse({"model": DEMO_MODEL, "policy": "pipemax", "max_model_len": 512} | values)


def test_settings_survive_the_way_to_the_other_processes() -> None:
    model = StepTimeModel.linear(alpha_s=1e-3, beta_s=1e-7, delta_s=1e-2)
    stage = StageConfig(kv_bytes_per_token=10, h2d_bytes_per_s=1e9, decode_time=model, prefill_time=model)
    settings = RuntimeSettings(
        host_kv_tokens=7 * 32 + 31,
        num_batches=3,
        max_num_seqs=8,
        stages=(stage,),
        controller={"steady_window": 4},
    )
    read = RuntimeSettings.from_extra_config(settings.to_extra_config())
    assert read == settings
    controller = read.controller_config(gpu_blocks=5, block_tokens=32, prefill_chunk_tokens=64, max_slots=100)
    assert controller.stages == (stage,)
    assert (controller.host_blocks, controller.num_batches, controller.steady_window) == (7, 3, 4)
    assert (controller.max_num_seqs, controller.max_on_gpu) == (8, 24)
    assert controller.wave_groups is None


def test_waves_are_off_unless_they_are_on() -> None:
    for waves, expected in ((None, None), ("auto", None), (False, None), ("on", 4), (True, 4)):
        values = {} if waves is None else {"waves": waves}
        with launch_environment(config(**values)):
            vllm_config = make_vllm_config(config(**values))
        assert runtime_settings(vllm_config).wave_groups == expected


def test_waves_of_a_single_batch_are_refused() -> None:
    wanted = config(waves="on", num_batches=1)
    with launch_environment(wanted), pytest.raises(ValueError, match=r"waves: on .*need at least 2 batches"):
        make_vllm_config(wanted)


@pytest.mark.parametrize(
    ("cores", "num_workers", "expected"),
    [
        ([0, 1], 2, "0|1"),
        ([0, 1], 4, "0|1|0|1"),
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([4, 5, 6], 2, "4|5,6"),
        ([0], 2, "0|0"),
    ],
)
def test_workers_share_the_cores(cores: list[int], num_workers: int, expected: str) -> None:
    assert _cores_of_workers(cores, num_workers) == expected


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1|0")
    before = dict(os.environ)
    with launch_environment(config(pipeline_parallel_size=2)):
        assert os.environ["VLLM_KV_CACHE_LAYOUT"] == "BLHNC"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "1|0", "the user's own wins"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, Batching.SEPARATED), ({"batching": "mixed"}, Batching.MIXED)],
    ids=["by default", "mixed"],
)
def test_the_engine_s_batching_reaches_the_controller(values: dict[str, object], expected: Batching) -> None:
    controller = runtime_settings(make_vllm_config(config(**values))).controller_config(
        gpu_blocks=50, block_tokens=32, prefill_chunk_tokens=64, max_slots=100
    )
    assert controller.batching is expected
    assert controller.step_tokens == 64


def test_a_pipemax_engine_is_vllm_with_our_scheduler_worker_and_connector() -> None:
    vllm_config = make_vllm_config(config(pipeline_parallel_size=2, host_kv_gib=0.125, dtype="float32"))
    settings = runtime_settings(vllm_config)
    assert settings.num_batches == 2
    assert len(settings.stages) == 2
    assert vllm_config.scheduler_config.scheduler_cls.endswith("PipeMaxScheduler")
    assert not vllm_config.scheduler_config.async_scheduling
    per_token = settings.stages[0].kv_bytes_per_token
    assert settings.host_kv_tokens == 2**27 // per_token


def test_ranks_that_share_a_stage_have_pools_of_their_own_for_their_share_of_the_heads() -> None:
    settings = [
        runtime_settings(
            make_vllm_config(config(tensor_parallel_size=tensor, pipeline_parallel_size=2, host_kv_gib=0.125))
        )
        for tensor in (1, 2)
    ]
    alone, shared = settings
    assert [stage.kv_bytes_per_token * 2 for stage in shared.stages] == [
        stage.kv_bytes_per_token for stage in alone.stages
    ]
    assert shared.host_kv_tokens == 2 * alone.host_kv_tokens


def test_the_host_pool_has_the_same_size_whatever_block_size_the_workers_choose() -> None:
    """As they do for a GPU's attention kernels when the model is loaded, long after this config was made."""
    vllm_config = make_vllm_config(config(host_kv_gib=0.125))
    settings = runtime_settings(vllm_config)
    for chosen in (16, 64, 256):
        vllm_config.cache_config.block_size = chosen
        vllm_config.cache_config.num_gpu_blocks = 100
        num_tokens = settings.host_blocks(chosen) * chosen
        assert settings.host_kv_tokens - chosen < num_tokens <= settings.host_kv_tokens
        assert admission_capacity_tokens(vllm_config) <= num_tokens
        assert admission_capacity_tokens(vllm_config) > 0.9 * num_tokens


def test_a_host_pool_below_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="one request of max_model_len 512 needs"):
        make_vllm_config(config(host_kv_gib=1e-4))


@pytest.mark.parametrize(
    ("num_gpus", "worker"),
    [
        (0, "pipemax.vllm_ext.worker.cpu_worker.PipeMaxCpuWorker"),
        (8, "pipemax.vllm_ext.worker.gpu_worker.PipeMaxGpuWorker"),
    ],
)
def test_the_device_decides_on_the_worker(num_gpus: int, worker: str) -> None:
    args = _pipemax_args(config(), num_gpus=num_gpus)
    assert args["worker_cls"] == worker
    module, name = worker.rsplit(".", 1)
    assert hasattr(importlib.import_module(module), name)


def test_another_vllm_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "SUPPORTED_VERSIONS", ("0.31.0",))
    with pytest.raises(ValueError, match=r"runs on vLLM 0\.31\.0, .* policy vllm runs on any"):
        make_vllm_config(config())


@pytest.mark.parametrize(
    ("runner", "stages", "scheduler", "depth", "num_batches"),
    [
        (1, 1, "PipeMaxAsyncScheduler", 2, 2),
        (1, 2, "PipeMaxScheduler", 2, 2),
        (2, 1, "PipeMaxAsyncScheduler", 2, 2),
        (2, 2, "PipeMaxAsyncScheduler", 3, 2),
    ],
)
def test_the_scheduler_is_the_one_that_fits_what_vllm_decided(
    runner: int, stages: int, scheduler: str, depth: int, num_batches: int
) -> None:
    with asynchronous_scheduling_on_cpu(), runner_version(runner):
        vllm_config = make_vllm_config(config(pipeline_parallel_size=stages, max_num_seqs=16))
        assert vllm_config.max_concurrent_batches == depth
    assert vllm_config.scheduler_config.scheduler_cls == f"pipemax.vllm_ext.scheduler.scheduler.{scheduler}"
    settings = runtime_settings(vllm_config)
    assert settings.num_batches == num_batches
    assert settings.max_num_seqs == 16
    slots = 16 * num_batches if runner == 2 else 16
    assert vllm_config.scheduler_config.max_num_seqs == slots


@pytest.mark.parametrize("policy", ["vllm", "pipemax"])
def test_both_policies_get_vllm_s_defaults_for_offline_batches(policy: str) -> None:
    """Not those of a usage context that vLLM's tables lack: 128 requests and 2,048 tokens in a step."""
    scheduler = make_vllm_config(config(policy=policy, pipeline_parallel_size=2)).scheduler_config
    tokens, seqs = EngineArgs.get_batch_defaults(world_size=2)
    assert scheduler.max_num_seqs == seqs[UsageContext.LLM_CLASS] == 512
    assert scheduler.max_num_batched_tokens == tokens[UsageContext.LLM_CLASS] == 8192


@pytest.mark.parametrize(
    ("num_blocks", "slots"),
    [(10_000, 48), (1_000, 1_000 * 16 // 512), (10, 16)],
    ids=["batches", "KV", "one"],
)
def test_the_v2_runner_has_slots_for_those_whose_kv_fits_the_gpu(num_blocks: int, slots: int) -> None:
    """At most for the requests of all three batches, at least for those of one."""
    pool = {"num_gpu_blocks_override": num_blocks}
    with runner_version(2):
        vllm_config = make_vllm_config(config(num_batches=3, max_num_seqs=16, block_size=16, vllm=pool))
    assert vllm_config.scheduler_config.max_num_seqs == slots


def scheduler_of(**values: object) -> object:
    with launch_environment(config(**values)):
        return make_vllm_config(config(**values)).scheduler_config.scheduler_cls


def test_stock_vllm_s_limits_may_change_unless_the_user_names_a_scheduler() -> None:
    assert scheduler_of(policy="vllm") == "pipemax.vllm_ext.scheduler.tunable.TunableScheduler"
    with asynchronous_scheduling_on_cpu():
        name = scheduler_of(policy="vllm", vllm={"async_scheduling": True})
        assert name == "pipemax.vllm_ext.scheduler.tunable.TunableAsyncScheduler"
    theirs = "vllm.v1.core.sched.scheduler.Scheduler"
    assert scheduler_of(policy="vllm", vllm={"scheduler_cls": theirs}) == theirs


def test_vllm_warns_of_scheduler_classes_of_others_only() -> None:
    """It says that asynchronous scheduling may be off, and ours keep it."""
    warnings: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            warnings.append(record.getMessage())
        return True

    end_with_server()
    logger = logging.getLogger("vllm.config.scheduler")
    logger.addFilter(keep)  # behind ours: it sees what that lets through
    # vLLM warns of a name once in a process: of these no other test has it warn.
    for name in ("pipemax.vllm_ext.scheduler.tunable.StepRecorder", "collections.OrderedDict"):
        SchedulerConfig.default_factory(scheduler_cls=name).get_scheduler_cls()
    logger.removeFilter(keep)
    assert [warning.split(". ")[0] for warning in warnings] == [
        "Using custom scheduler class collections.OrderedDict"
    ]


def test_where_vllm_lacks_a_limit_its_own_scheduler_runs_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = ("Scheduler.max_num_active_reqs",)
    monkeypatch.setattr(tunable_scheduler, "installed_lacks_for_tuning", lambda: lacking)
    tunable_scheduler._say_fixed.cache_clear()
    assert scheduler_of(policy="vllm") is None
    assert scheduler_of(policy="vllm") is None
    assert caplog.text.count("changing them while it runs needs Scheduler.max_num_active_reqs") == 1


@pytest.mark.parametrize("policy", ["vllm", "pipemax"])
def test_more_stages_than_layers_are_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size 3 is more than the 2 layers of"):
        make_vllm_config(config(policy=policy, pipeline_parallel_size=3))


def own_connector(directory: Path) -> dict[str, object]:
    """Under ``vllm:``, as a user writes it."""
    return {
        "kv_transfer_config": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(directory)},
        }
    }


def test_under_policy_vllm_the_user_s_kv_connector_is_kept(tmp_path: Path) -> None:
    stock = make_vllm_config(config(policy="vllm"))
    with_connector = make_vllm_config(config(policy="vllm", vllm=own_connector(tmp_path)))
    assert with_connector.kv_transfer_config.kv_connector == "ExampleConnector"
    for made in (stock, with_connector):
        made.cache_config.num_gpu_blocks = 100
    assert admission_capacity_tokens(with_connector) == admission_capacity_tokens(stock) > 0


def test_the_real_max_num_seqs_is_vllm_s_choice_and_under_pipemax_that_of_a_step() -> None:
    stock = make_vllm_config(config(policy="vllm"))
    assert real_max_num_seqs(stock) == stock.scheduler_config.max_num_seqs > 0
    made = make_vllm_config(config(max_num_seqs=24))
    made.scheduler_config.max_num_seqs = 96  # as for the slots of vLLM's V2 runner
    assert real_max_num_seqs(made) == 24


def test_vllm_s_own_offloading_is_kept_under_policy_vllm() -> None:
    made = make_vllm_config(config(policy="vllm", vllm={"kv_offloading_size": 0.1}))
    assert made.kv_transfer_config.kv_connector == "OffloadingConnector"
    made.cache_config.num_gpu_blocks = 100
    assert admission_capacity_tokens(made) > 0


def test_with_a_user_s_kv_connector_auto_takes_stock_vllm(tmp_path: Path) -> None:
    brought = config(policy="auto", vllm=own_connector(tmp_path))
    expected = forecast(brought.model_copy(update={"policy": Policy.PIPEMAX}))
    assert "kv_transfer_config" in expected.refusal


def test_json_is_compact_unless_the_config_says_otherwise() -> None:
    def told(**values: object) -> tuple[str, bool, str]:
        args = engine_args(EngineConfig.parse({"model": DEMO_MODEL, "policy": "vllm"} | values))
        own = args.create_structured_outputs_config()
        return own.backend, own.disable_any_whitespace, own.reasoning_parser

    assert told() == ("xgrammar", True, "")
    assert told(reasoning_parser="qwen3") == ("xgrammar", True, "qwen3")
    assert told(json_backend="guidance") == ("guidance", True, "")
    assert told(json_whitespace="any") == ("auto", False, "")
    assert told(task="embed") == ("auto", False, "")
    for own, expected in (
        ({"backend": "outlines"}, ("outlines", False, "")),
        ({"disable_any_whitespace": False}, ("auto", False, "")),
        ({"enable_in_reasoning": True}, ("xgrammar", True, "")),
    ):
        assert told(vllm={"structured_outputs_config": own}) == expected, own
