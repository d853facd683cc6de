"""A supported vLLM that is not the installed one: its sources have what PipeMax relies on."""

import pytest

from pipemax.vllm_ext.seam.relied_on import TUNABLE_ATTRIBUTES, TUNABLE_METHODS
from pipemax.vllm_ext.seam.supported import SUPPORTED_VERSIONS
from pipemax.vllm_ext.seam.version import lacks
from tools.check_vllm import sources_of


@pytest.mark.long  # downloads a wheel of 340 MB, once
@pytest.mark.parametrize("version", SUPPORTED_VERSIONS[1:])
def test_the_sources_of_a_later_vllm_have_all_of_it(version: str) -> None:
    root = sources_of(version)
    assert [*lacks(root), *lacks(root, TUNABLE_METHODS, TUNABLE_ATTRIBUTES)] == []
