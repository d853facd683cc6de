"""Stage times against what was measured, and the shapes that they must have."""

from dataclasses import replace

import pytest

from pipemax.domain.hardware import AllReduceSpec, WeightDtype
from pipemax.domain.specs import KvCacheDtype, ModelSpec, Parallelism
from pipemax.presets import load_model, load_node
from pipemax.sim.stage_times import StageTimes, StepWork, prompt_pairs, window_pairs

# Milliseconds by batch size, a Llama-13B layer stack on one L20: TD-Pipe's published profile.
L20_STAIRCASE_MS = {
    1: 35.3,
    16: 37.8,
    17: 44.6,
    64: 43.9,
    128: 47.8,
    129: 60.1,
    256: 70.0,
    257: 95.7,
    512: 131.7,
    2048: 508.7,
}
LLAMA_13B = ModelSpec(
    name="llama-13b",
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    ffn_size=13824,
    num_experts=1,
    experts_per_token=1,
    vocab_size=32000,
    bytes_per_value=2,
)


def test_staircase_of_an_l20_is_met() -> None:
    node = load_node("l20x8")
    node = replace(node, gpu=replace(node.gpu, step_overhead_s=0.0))
    times = StageTimes(node, LLAMA_13B, Parallelism(pipeline=1, tensor=1))
    errors = []
    for batch, measured_ms in L20_STAIRCASE_MS.items():
        layers_s = times.stage_s(StepWork(prefill_tokens=batch))[0]
        errors.append(abs(layers_s * 1e3 / measured_ms - 1))
    assert max(errors) < 0.05


@pytest.mark.parametrize(
    "name",
    ["llama2-70b", "mixtral-8x7b", "qwen3-8b", "qwen3-32b", "qwen3-235b-a22b", "gpt-oss-120b", "gemma-3-27b"],
)
def test_steps_never_get_shorter_with_more_work(name: str) -> None:
    times = StageTimes(load_node("rtx5090x8"), load_model(name), Parallelism(pipeline=8, tensor=1))

    def step_s(batch: int, context: int) -> float:
        return max(times.stage_s(StepWork(decode_requests=batch, decode_context_tokens=context)))

    by_batch = [step_s(batch, 1000) for batch in range(1, 600, 7)]
    assert by_batch == sorted(by_batch)
    assert step_s(64, 20_000) < step_s(64, 40_000)


def test_experts_of_fewer_bits_are_read_faster_and_compute_no_faster() -> None:
    node = load_node("h100x8")
    layout = Parallelism(pipeline=1, tensor=1)
    own = load_model("mixtral-8x7b")
    packed = replace(own, expert_bytes_per_value=0.5)

    def step_s(model: ModelSpec, tokens: int) -> float:
        return StageTimes(node, model, layout).stage_s(StepWork(prefill_tokens=tokens))[0]

    assert step_s(packed, 16) < 0.5 * step_s(own, 16), "reading weights is all of it"
    assert step_s(packed, 16384) == pytest.approx(step_s(own, 16384), rel=0.05), (
        "arithmetic is nearly all of it"
    )


def test_only_the_last_stage_has_the_head_and_layers_are_uneven() -> None:
    model = load_model("qwen3-235b-a22b")
    times = StageTimes(load_node("h100x8"), model, Parallelism(pipeline=8, tensor=1))
    assert times.layers == (12, 12, 12, 12, 12, 12, 11, 11)
    stage_s = times.stage_s(StepWork(decode_requests=64, decode_context_tokens=64_000))
    assert stage_s[0] == stage_s[5] > stage_s[6]
    assert stage_s[7] > stage_s[6]


def test_tensor_parallel_divides_the_work_and_adds_two_all_reduces_a_layer() -> None:
    model, node = load_model("llama2-70b"), load_node("rtx5090x8")
    work = StepWork(decode_requests=256, decode_context_tokens=100_000)
    free = replace(node, all_reduce=AllReduceSpec(bus_bytes_per_s=1e18, latency_s=0.0))
    alone = StageTimes(free, model, Parallelism(pipeline=1, tensor=1)).stage_s(work)[0]
    split = StageTimes(free, model, Parallelism(pipeline=1, tensor=8)).stage_s(work)[0]
    overhead_s = node.gpu.step_overhead_s
    assert split - overhead_s == pytest.approx((alone - overhead_s) / 8)
    real = StageTimes(node, model, Parallelism(pipeline=1, tensor=8)).stage_s(work)[0]
    one_s = 60e-6 + 256 * 8192 * 2 * 2 * 7 / 8 / 20e9
    assert real - split == pytest.approx(160 * one_s, rel=1e-6)


def test_prompt_pairs_add_up_over_chunks() -> None:
    assert prompt_pairs(0, 4) == 1 + 2 + 3 + 4
    assert prompt_pairs(0, 1000) == prompt_pairs(0, 300) + prompt_pairs(300, 700)


@pytest.mark.parametrize(("pipeline", "tensor"), [(8, 1), (1, 8)])
def test_fp8_kv_halves_what_attention_reads_and_nothing_else(pipeline: int, tensor: int) -> None:
    """100,000 tokens of 70B's KV over eight GPUs: 2.048 GB on each in FP8."""
    node, own = load_node("rtx5090x8"), load_model("llama2-70b")
    layout = Parallelism(pipeline=pipeline, tensor=tensor)
    before = StageTimes(node, own, layout)
    after = StageTimes(node, own.with_kv_dtype(KvCacheDtype.FP8), layout)
    work = StepWork(decode_requests=64, decode_context_tokens=100_000)
    saved_s = before.stage_s(work)[0] - after.stage_s(work)[0]
    assert saved_s == pytest.approx(100_000 * 80 * 2 * 8 * 128 / 8 / node.gpu.hbm_bytes_per_s)
    prompts = StepWork(prefill_tokens=512, prefill_pairs=100_000.0)
    assert after.stage_s(prompts) == before.stage_s(prompts)
    assert after.activation_bytes(64) == before.activation_bytes(64)
    assert after.kv_bytes_per_token(0) * 2 == before.kv_bytes_per_token(0)


def test_pairs_within_a_window_add_up_over_chunks() -> None:
    assert window_pairs(0, 4, 2) == 1 + 2 + 2 + 2
    assert window_pairs(0, 1000, 128) == window_pairs(0, 300, 128) + window_pairs(300, 700, 128)
    assert window_pairs(0, 100, 128) == prompt_pairs(0, 100)


def test_layers_with_a_window_read_and_compute_no_more_than_the_window() -> None:
    """gpt-oss-120b: a stage of five layers has three with a window of 128 tokens."""
    node, model = load_node("rtx5090x8"), load_model("gpt-oss-120b")
    layout = Parallelism(pipeline=8, tensor=1)
    windows = StageTimes(node, model, layout)
    whole = StageTimes(node, replace(model, window_tokens=None, full_layers=()), layout)
    row_bytes = model.kv_bytes_per_token_and_layer
    decode = StepWork(decode_requests=64, decode_context_tokens=64 * 2000)
    saved_s = whole.stage_s(decode)[0] - windows.stage_s(decode)[0]
    assert saved_s == pytest.approx(3 * 64 * (2000 - 128) * row_bytes / node.gpu.hbm_bytes_per_s)
    told = replace(decode, decode_window_tokens=64 * 100)
    more_s = windows.stage_s(decode)[0] - windows.stage_s(told)[0]
    assert more_s == pytest.approx(3 * 64 * 28 * row_bytes / node.gpu.hbm_bytes_per_s)
    prompt = StepWork(
        prefill_tokens=2000,
        prefill_pairs=prompt_pairs(0, 2000),
        prefill_window_pairs=window_pairs(0, 2000, 128),
    )
    saved_pairs = prompt_pairs(0, 2000) - window_pairs(0, 2000, 128)
    saved_s = whole.stage_s(prompt)[0] - windows.stage_s(prompt)[0]
    assert saved_s == pytest.approx(3 * 4 * 64 * 64 * saved_pairs / node.gpu.flops_per_s)
    short = StepWork(decode_requests=64, decode_context_tokens=64 * 100)
    assert windows.stage_s(short) == whole.stage_s(short)


@pytest.mark.parametrize(("dtype", "bytes_share", "flops_ratio"), [("fp8", 1 / 2, 2), ("fp4", 0.5625 / 2, 8)])
def test_fewer_bits_of_weights_are_read_and_computed_faster(
    dtype: str, bytes_share: float, flops_ratio: float
) -> None:
    """On an RTX 5090, which has both types; attention and the head take as long as before."""
    node, own = load_node("rtx5090x8"), load_model("llama2-70b")
    packed = own.with_weights(WeightDtype(dtype))
    assert packed.layer_weight_bytes == pytest.approx(bytes_share * own.layer_weight_bytes)
    assert packed.head_weight_bytes == own.head_weight_bytes

    def step_s(model: ModelSpec, work: StepWork) -> float:
        gpu = replace(node.gpu, step_overhead_s=0.0)
        return StageTimes(replace(node, gpu=gpu), model, Parallelism(pipeline=8, tensor=1)).stage_s(work)[0]

    few, many = StepWork(prefill_tokens=1), StepWork(prefill_tokens=200_000)
    assert step_s(packed, few) == pytest.approx(bytes_share * step_s(own, few), rel=0.05)
    assert step_s(packed, many) == pytest.approx(step_s(own, many) / flops_ratio, rel=0.01)


def test_a_gpu_without_fp8_reads_half_the_bytes_and_computes_as_before() -> None:
    node, own = load_node("8xA100-80GB"), load_model("llama2-70b")
    layout = Parallelism(pipeline=8, tensor=1)
    before, after = (StageTimes(node, model, layout) for model in (own, own.with_weights(WeightDtype.FP8)))
    few, many = StepWork(prefill_tokens=1), StepWork(prefill_tokens=200_000)
    assert node.gpu.fp8_flops_per_s is None
    assert after.stage_s(few)[0] < 0.6 * before.stage_s(few)[0]
    assert after.stage_s(many)[0] == pytest.approx(before.stage_s(many)[0], rel=0.01)


def test_the_cost_of_mixed_steps_counts_for_prompt_tokens_beside_decodes_only() -> None:
    node, model, layout = load_node("l20x8"), load_model("llama2-70b"), Parallelism(pipeline=8, tensor=1)
    dear = replace(node, gpu=replace(node.gpu, mixed_cost=1.5))
    usual_times, dear_times = (StageTimes(one, model, layout) for one in (node, dear))
    decode = StepWork(decode_requests=100, decode_context_tokens=50_000)
    prompt = StepWork(prefill_tokens=400, prefill_pairs=80_000.0)
    mixed = StepWork(
        decode_requests=100, decode_context_tokens=50_000, prefill_tokens=400, prefill_pairs=80_000.0
    )
    for work in (decode, prompt):
        assert dear_times.stage_s(work) == usual_times.stage_s(work)
    added_s = usual_times.stage_s(mixed)[0] - usual_times.stage_s(decode)[0]
    assert dear_times.stage_s(mixed)[0] == pytest.approx(usual_times.stage_s(mixed)[0] + 0.5 * added_s)
