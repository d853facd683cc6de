"""Where an engine's calibration comes from, and what is known of an engine before it starts."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from pipemax.control.controller_config import StageConfig
from pipemax.control.times.calibration import Calibration, save_calibration
from pipemax.domain.step_times import StepTimeModel
from pipemax.node.host_pool_size import expected_rows
from pipemax.vllm_ext.launch.forecast import forecast
from pipemax.vllm_ext.launch.known_calibration import (
    cache_path,
    known_calibration,
    kv_bytes_per_token,
    remember_calibration,
)
from pipemax.vllm_ext.launch.vllm_config import make_vllm_config
from pipemax.vllm_ext.seam import version
from tests.unit.vllm_ext.launch.demo_config import DEMO_MODEL
from tests.unit.vllm_ext.launch.demo_config import two_stages as config

pytestmark = pytest.mark.usefixtures("cache")


def calibration(kv_bytes: list[int], measured: str = "by hand") -> Calibration:
    times = StepTimeModel.linear(alpha_s=1e-3, beta_s=1e-7, delta_s=1e-2)
    stages = tuple(
        StageConfig(kv_bytes_per_token=own, h2d_bytes_per_s=5e9, decode_time=times, prefill_time=times)
        for own in kv_bytes
    )
    return Calibration(device="here", model="demo", measured=measured, stages=stages, round_trip_s=0.002)


def test_a_measured_calibration_is_found_at_the_next_start() -> None:
    own = config()
    vllm_config = make_vllm_config(own)
    assert known_calibration(own, vllm_config) is None
    measured = calibration(kv_bytes_per_token(vllm_config))
    remember_calibration(own, vllm_config, measured)
    assert known_calibration(own, vllm_config) == measured
    assert known_calibration(config(host_kv_gib=0.5, seed=3), vllm_config) == measured, (
        "times do not depend on it"
    )
    other = config(dtype="float32")
    assert cache_path(other, make_vllm_config(other)) != cache_path(own, vllm_config)
    for kv_cache_dtype in ("fp8", "fp8_e5m2"):
        fp8 = config(kv_cache_dtype=kv_cache_dtype)
        assert known_calibration(fp8, make_vllm_config(fp8)) is None, "it reads and copies other bytes"


def test_a_named_file_wins_and_one_of_another_engine_is_refused(tmp_path: Path) -> None:
    vllm_config = make_vllm_config(config())
    kv_bytes = kv_bytes_per_token(vllm_config)
    remember_calibration(config(), vllm_config, calibration(kv_bytes))
    named = tmp_path / "named.yaml"
    save_calibration(named, calibration(kv_bytes, measured="with care"))
    found = known_calibration(config(calibration=str(named)), vllm_config)
    assert found is not None
    assert found.measured == "with care"
    save_calibration(named, calibration([kv_bytes[0] + 1, kv_bytes[1]]))
    with pytest.raises(ValueError, match="measured for another model, dtype, KV dtype or number of stages"):
        known_calibration(config(calibration=str(named)), vllm_config)
    fp8 = config(calibration=str(tmp_path / "of-16-bits.yaml"), kv_cache_dtype="fp8")
    save_calibration(tmp_path / "of-16-bits.yaml", calibration(kv_bytes))
    with pytest.raises(ValueError, match="measured for another model, dtype, KV dtype"):
        make_vllm_config(fp8)
    with pytest.raises(ValueError, match=r"none\.yaml: .*No such file"):
        known_calibration(config(calibration=str(tmp_path / "none.yaml")), vllm_config)


def test_a_torn_cache_file_is_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    vllm_config = make_vllm_config(config())
    path = cache_path(config(), vllm_config)
    path.parent.mkdir(parents=True)
    path.write_text("device: [")
    assert known_calibration(config(), vllm_config) is None
    assert "measured again" in caplog.text


def test_a_cache_that_cannot_be_written_costs_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the directory should be")
    vllm_config = make_vllm_config(config())
    remember_calibration(config(), vllm_config, calibration(kv_bytes_per_token(vllm_config)))
    assert "the next start measures again" in caplog.text


def test_a_cache_that_cannot_be_looked_into_holds_no_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As another user's home, which root in a test could look into; a name that is too long is an error for all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("long" * 100)))
    assert known_calibration(config(), make_vllm_config(config())) is None
    assert "is measured again" in caplog.text


def test_a_calibration_is_found_whatever_block_size_the_workers_choose() -> None:
    vllm_config = make_vllm_config(config())
    before = cache_path(config(), vllm_config)
    vllm_config.cache_config.block_size *= 4
    assert cache_path(config(), vllm_config) == before
    named = config(block_size=64)
    assert cache_path(named, make_vllm_config(named)) != before


def test_a_calibrated_engine_is_known_before_it_starts() -> None:
    own = config(cpu_kv_gib=0.25, num_batches=3)
    assert forecast(own).engine is None, "nothing was measured yet"
    vllm_config = make_vllm_config(own)
    kv_bytes = kv_bytes_per_token(vllm_config)
    remember_calibration(own, vllm_config, calibration(kv_bytes))
    expected = forecast(own).engine
    assert expected is not None
    assert expected.round_trip_s == 0.002
    assert expected.num_batches == 3
    block_bytes = kv_bytes[0] * expected.capacity.block_tokens
    assert expected.capacity.gpu_blocks == 2**28 // block_bytes - 1
    assert expected.capacity.host_blocks == 2**30 // block_bytes


def test_auto_simulates_an_engine_with_the_kv_that_it_will_have() -> None:
    engines = []
    for kv_cache_dtype in ("auto", "fp8"):
        own = config(cpu_kv_gib=0.25, kv_cache_dtype=kv_cache_dtype)
        vllm_config = make_vllm_config(own)
        remember_calibration(own, vllm_config, calibration(kv_bytes_per_token(vllm_config)))
        engine = forecast(own).engine
        assert engine is not None
        engines.append(engine)
    before, after = engines
    assert [stage.kv_bytes_per_token * 2 for stage in after.stages] == [
        stage.kv_bytes_per_token for stage in before.stages
    ]
    assert after.capacity.gpu_blocks == 2 * before.capacity.gpu_blocks + 1, "vLLM keeps one for itself"
    assert after.capacity.host_blocks == 2 * before.capacity.host_blocks


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"pipeline_parallel_size": 1},
        {"dtype": "float32"},
        {"kv_cache_dtype": "fp8"},
        {"vllm": {"kv_cache_dtype": "fp8_e5m2"}},
        {"vllm": {"dtype": "float32"}},
    ],
)
def test_the_room_in_the_host_pool_is_guessed_from_the_model_s_configuration_alone(
    values: dict[str, object],
) -> None:
    own = config(host_kv_gib=0.5, **values)
    token_bytes = max(kv_bytes_per_token(make_vllm_config(own)))
    model = AutoConfig.from_pretrained(DEMO_MODEL)
    lengths = [100, 300]
    rows = expected_rows(
        own,
        model,
        num_stages=own.pipeline_parallel_size or 1,
        has_gpus=False,
        row_tokens=lengths,
    )
    assert rows == 2**29 // token_bytes // 200


def test_what_pipemax_cannot_run_is_refused_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    told = forecast(config(pipeline_parallel_size=1, vllm={"speculative_config": speculative})).refusal
    assert told.endswith("speculative decoding is on")
    monkeypatch.setattr(version, "SUPPORTED_VERSIONS", ("0.31.0",))
    assert "runs on vLLM 0.31.0" in forecast(config()).refusal
