"""What an engine takes for its own speed before it has measured anything."""

from pipemax.vllm_ext.launch.first_guess import guess_stage

LLAMA_70B_STAGE = 10 * 2 * 8 * 128 * 2
"""Bytes of KV per token: 10 layers, keys and values, 8 heads of 128, 16 bits."""


def test_the_first_guess_of_a_gpu_differs_from_that_of_a_cpu() -> None:
    cpu, gpu = (guess_stage(LLAMA_70B_STAGE, kv_value_bytes=2, is_cpu=is_cpu) for is_cpu in (True, False))
    assert gpu.h2d_bytes_per_s > 5 * cpu.h2d_bytes_per_s
    assert gpu.prefill_time.seconds(2048, 2048 * 1024) < cpu.prefill_time.seconds(2048, 2048 * 1024) / 4
    assert gpu.decode_time.seconds(256, 256 * 512) < cpu.decode_time.seconds(256, 256 * 512) / 2


def test_the_guess_is_of_an_l20s_order() -> None:
    """One stage of eight of a 70B model reads 17 GB of weights and, in a batch of 256, 5 GB of KV at 740 GB/s."""
    gpu = guess_stage(LLAMA_70B_STAGE, kv_value_bytes=2, is_cpu=False)
    assert 0.02 < gpu.decode_time.seconds(1, 512) < 0.05
    assert 0.03 < gpu.decode_time.seconds(256, 256 * 512) < 0.15
    assert gpu.kv_bytes_per_token == LLAMA_70B_STAGE


def test_fp8_kv_is_read_in_half_the_time_and_multiplied_as_often() -> None:
    whole = guess_stage(LLAMA_70B_STAGE, kv_value_bytes=2, is_cpu=False)
    half = guess_stage(LLAMA_70B_STAGE // 2, kv_value_bytes=1, is_cpu=False)
    assert half.decode_time.beta_s == whole.decode_time.beta_s / 2
    assert half.prefill_time == whole.prefill_time
