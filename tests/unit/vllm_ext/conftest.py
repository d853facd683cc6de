"""Which CPU the tests are on: one without AMX, unless a test or ``PIPEMAX_TEST_AMX=1`` says otherwise."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def has_amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Answer for the CPU where vLLM asks torch. ``parametrize(..., indirect=True)`` names what to answer."""
    answer = bool(getattr(request, "param", os.environ.get("PIPEMAX_TEST_AMX") == "1"))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: answer)
    return answer
