"""Profiles: what they say is what the reference tables say, and faults are named."""

from dataclasses import asdict, replace

import pytest

from pipemax.domain.hardware import WeightDtype
from pipemax.domain.layer_kinds import LayerKind, Mixer
from pipemax.domain.specs import KvCacheDtype, ModelSpec, NodeSpec, Parallelism, kv_capacity
from pipemax.presets import build_spec, load_model, load_node, override, preset_names, read_preset


@pytest.mark.parametrize(
    ("name", "weight_gb", "kv_bytes", "active_billion"),
    [
        ("llama2-70b", 137.95, 327_680, 68.7),
        ("mixtral-8x7b", 93.4, 131_072, 12.8),
        ("qwen3-8b", 16.38, 147_456, 7.57),
        ("qwen3-32b", 65.5, 262_144, 32.0),
        ("qwen3-235b-a22b", 470.2, 192_512, 21.6),
        ("gpt-oss-120b", 65.2, 73_728, 5.13),
        ("gemma-3-27b", 54.02, 507_904, 27.0),
    ],
)
def test_models_have_their_published_sizes(
    name: str, weight_gb: float, kv_bytes: int, active_billion: float
) -> None:
    model = load_model(name)
    assert model.weight_bytes / 1e9 == pytest.approx(weight_gb, rel=0.002)
    assert model.kv_bytes_per_token == kv_bytes
    assert model.active_params / 1e9 == pytest.approx(active_billion, rel=0.02)


def test_experts_of_fewer_bits_take_fewer_bytes_and_nothing_else_does() -> None:
    own = load_model("mixtral-8x7b")
    packed = replace(own, expert_bytes_per_value=0.5)
    expert_bytes = own.num_layers * own.num_experts * own.expert_params * own.bytes_per_value
    assert own.weight_bytes - packed.weight_bytes == pytest.approx(expert_bytes * 3 / 4)
    assert replace(own, expert_bytes_per_value=2.0).weight_bytes == own.weight_bytes
    assert packed.kv_bytes_per_token == own.kv_bytes_per_token
    with pytest.raises(ValueError, match="expert_bytes_per_value is -1, must be above zero"):
        replace(own, expert_bytes_per_value=-1)


def test_fp8_kv_takes_half_the_bytes_and_leaves_the_weights_as_they_are() -> None:
    """LLaMA-2-70B: 80 layers of keys and values of 8 heads of 128."""
    own = load_model("llama2-70b")
    fp8 = own.with_kv_dtype(KvCacheDtype.FP8)
    assert (own.kv_bytes_per_token, fp8.kv_bytes_per_token) == (80 * 2 * 8 * 128 * 2, 80 * 2 * 8 * 128)
    assert fp8.weight_bytes == own.weight_bytes
    assert own.with_kv_dtype(KvCacheDtype.AUTO) == own
    assert fp8 == own.with_kv_dtype(KvCacheDtype.FP8_E5M2), "one byte too"


@pytest.mark.parametrize("tensor", [1, 2])
def test_both_pools_hold_twice_as_many_blocks_of_fp8_kv(tensor: int) -> None:
    node, own = load_node("rtx5090x8"), load_model("llama2-70b")
    layout = Parallelism(pipeline=8 // tensor, tensor=tensor)
    before = kv_capacity(node, own, layout)
    after = kv_capacity(node, own.with_kv_dtype(KvCacheDtype.FP8), layout)
    assert after.gpu_blocks in (2 * before.gpu_blocks, 2 * before.gpu_blocks + 1)
    assert after.host_blocks in (2 * before.host_blocks, 2 * before.host_blocks + 1)


def test_stock_vllm_has_room_for_several_times_as_many_long_rows_of_a_model_with_windows() -> None:
    """Gemma 3 27B over two GPUs: 10 of 62 layers keep all of a row's 16,384 tokens, the others 1,024 of them."""
    node, model = load_node("h100x8"), load_model("gemma-3-27b")
    layout = Parallelism(pipeline=2, tensor=1)
    whole = kv_capacity(node.part(2), model, layout)
    freed = kv_capacity(node.part(2), model, layout, frees_windows=True)
    assert (freed.groups.full, freed.groups.window) == (1, 6), "six groups, of 8 or 9 layers each"
    # Five full layers a stage, and a block has room for five layers of either kind.
    assert freed.gpu_blocks == pytest.approx(whole.gpu_blocks * 31 / 5, rel=1e-3)
    per_row = 16_384 // 16 + 6 * (1024 // 16 + 1)
    assert freed.gpu_rows(16_384) == pytest.approx(freed.gpu_blocks / per_row, rel=0.01)
    assert freed.gpu_rows(16_384) / whole.gpu_rows(16_384) > 4
    assert freed.gpu_rows(500) <= whole.gpu_rows(500), "short rows gain nothing, and groups have gaps"


def test_without_windows_nothing_is_freed() -> None:
    node, model = load_node("rtx5090x8"), load_model("llama2-70b")
    layout = Parallelism(pipeline=8, tensor=1)
    assert kv_capacity(node, model, layout, frees_windows=True) == kv_capacity(node, model, layout)


def test_layers_of_a_profile_with_windows_are_checked() -> None:
    values = read_preset("models", "gpt-oss-120b")
    assert build_spec(ModelSpec, values, "own").layer_kinds(0, 5)[LayerKind(Mixer.WINDOW, False)] == 3
    with pytest.raises(ValueError, match=r"full_layers \(1, 36\) of 36 layers"):
        build_spec(ModelSpec, values | {"full_layers": [1, 36]}, "own")
    with pytest.raises(ValueError, match="full_layers are given without window_tokens"):
        build_spec(ModelSpec, values | {"window_tokens": None}, "own")
    with pytest.raises(ValueError, match="full_layers must be a list of integers, got 'every second'"):
        build_spec(ModelSpec, values | {"full_layers": "every second"}, "own")


def test_a_model_profile_may_say_the_type_of_its_weights() -> None:
    values = read_preset("models", "qwen3-32b")
    own = build_spec(ModelSpec, values | {"weight_dtype": "fp8", "expert_bytes_per_value": 1.0}, "own")
    assert own.weight_dtype is WeightDtype.FP8
    with pytest.raises(ValueError, match="own: weight_dtype must be bf16 or fp8 or fp4, got 'int4'"):
        build_spec(ModelSpec, values | {"weight_dtype": "int4"}, "own")


def test_a_model_profile_may_say_the_bytes_of_kv_and_need_not() -> None:
    values = read_preset("models", "llama2-70b")
    assert build_spec(ModelSpec, values, "own").kv_value_bytes == 2
    assert build_spec(ModelSpec, values | {"kv_bytes_per_value": 1}, "own").kv_value_bytes == 1
    assert build_spec(ModelSpec, values | {"kv_bytes_per_value": None}, "own").kv_value_bytes == 2
    with pytest.raises(ValueError, match="kv_bytes_per_value must be a number, got 'half'"):
        build_spec(ModelSpec, values | {"kv_bytes_per_value": "half"}, "own")
    with pytest.raises(ValueError, match=r"own: ModelSpec\.kv_bytes_per_value is 0, must be above zero"):
        build_spec(ModelSpec, values | {"kv_bytes_per_value": 0}, "own")


def test_block_first_and_layer_first_reach_their_shares_of_the_link() -> None:
    """One piece of 640 KiB a block against ten of 64 KiB: LLaMA-2-70B over 8 stages."""
    link = load_node("rtx5090x8").link
    peak = link.host_to_gpu_bytes_per_s
    assert link.effective_host_to_gpu_bytes_per_s(640 * 1024) / peak == pytest.approx(0.78, abs=0.03)
    assert link.effective_host_to_gpu_bytes_per_s(64 * 1024) / peak == pytest.approx(0.27, abs=0.03)


def test_more_gpus_than_kv_heads_hold_copies() -> None:
    node, model = load_node("h100x8"), load_model("qwen3-235b-a22b")
    tensor = kv_capacity(node, model, Parallelism(pipeline=1, tensor=8))
    halves = kv_capacity(node, model, Parallelism(pipeline=2, tensor=4))
    assert tensor.gpu_tokens < 0.7 * halves.gpu_tokens


def test_gpus_that_share_stages_hold_as_much_kv_as_more_stages_do() -> None:
    node, model = load_node("h100x8"), load_model("llama2-70b")
    alone, *shared = (
        kv_capacity(node, model, Parallelism(pipeline=8 // tensor, tensor=tensor)) for tensor in (1, 2, 4)
    )
    for pools in shared:
        assert pools.host_blocks == alone.host_blocks
        # Fewer GPUs are bound by the head and the embedding: they have more room, at most that of a head.
        assert 1.0 <= pools.gpu_blocks / alone.gpu_blocks < 1.05


def test_more_gpus_than_kv_heads_keep_copies_on_the_host_too() -> None:
    node, model = load_node("h100x8"), replace(load_model("qwen3-8b"), num_kv_heads=4)
    four, eight = (
        kv_capacity(node, model, Parallelism(pipeline=1, tensor=tensor)).host_blocks for tensor in (4, 8)
    )
    assert eight == four // 2


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"qwen3-235b-a22b does not fit on rtx5090x8"):
        kv_capacity(load_node("rtx5090x8"), load_model("qwen3-235b-a22b"), Parallelism(pipeline=8, tensor=1))


def test_shares_above_one_and_rates_of_zero_are_refused() -> None:
    node = load_node("l20x8")
    with pytest.raises(ValueError, match="host_kv_fraction"):
        replace(node, host_kv_fraction=1.5)
    with pytest.raises(ValueError, match="hbm_bytes_per_s"):
        replace(node.gpu, hbm_bytes_per_s=0.0)


def test_every_shipped_profile_loads() -> None:
    assert [load_model(name).name for name in preset_names("models")] == preset_names("models")


def test_unknown_missing_and_non_numeric_keys_are_named() -> None:
    values = asdict(load_node("l20x8"))
    with pytest.raises(ValueError, match=r"unknown keys \['gpus'\]"):
        build_spec(NodeSpec, {**values, "gpus": 8}, "mine.yaml")
    gpu = {key: value for key, value in values["gpu"].items() if key != "name"}
    with pytest.raises(ValueError, match=r"mine.yaml: gpu: unknown keys \[\], missing keys \['name'\]"):
        build_spec(NodeSpec, {**values, "gpu": gpu}, "mine.yaml")
    with pytest.raises(ValueError, match="num_gpus must be a number"):
        build_spec(NodeSpec, {**values, "num_gpus": "eight"}, "mine.yaml")


def test_single_numbers_are_overridden_by_dotted_paths() -> None:
    node = override(load_node("l20x8"), {"all_reduce.bus_bytes_per_s": 1e10, "num_gpus": 4})
    assert (node.all_reduce.bus_bytes_per_s, node.num_gpus) == (1e10, 4)
    for path, fault in (("link.speed", "no 'speed'"), ("num_gpus.x", "no parts"), ("gpu", "is no number")):
        with pytest.raises(ValueError, match=fault):
            override(node, {path: 1.0})
