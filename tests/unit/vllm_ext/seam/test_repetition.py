"""The check for repeated tokens says what vLLM's says."""

from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.utils import check_sequence_repetition as vllm_check
from vllm.v1.utils import ConstantList

from pipemax.vllm_ext.seam.repetition import check_sequence_repetition


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Tokens, of which many end with a pattern over and over, or nearly."""
    tokens = st.integers(0, draw(st.sampled_from([1, 2, 5, 1_000])))
    pattern = draw(st.lists(tokens, min_size=1, max_size=12))
    return (
        draw(st.lists(tokens, max_size=12))
        + pattern * draw(st.integers(0, 6))
        + draw(st.lists(tokens, max_size=2))
    )


@given(outputs(), st.integers(0, 14), st.integers(0, 14), st.integers(2, 5))
def test_it_agrees_with_vllm(tokens: list[int], least: int, most: int, times: int) -> None:
    params = RepetitionDetectionParams(
        max_pattern_size=max(least, most), min_pattern_size=least, min_count=times
    )
    assert check_sequence_repetition(ConstantList(tokens), params) == vllm_check(tokens, params)
