"""What is said of a model that cannot be read, before anything of it is loaded."""

from pathlib import Path

import pytest

from pipemax.checkpoint.model_config import read_model_config
from pipemax.config import EngineConfig


def test_a_model_where_its_user_may_not_look_is_told_by_name(tmp_path: Path) -> None:
    """As one in root's home for another user; a name that is too long is an error for root as well."""
    model = str(tmp_path / ("long" * 100))
    with pytest.raises(ValueError, match=r"model '/.*long' cannot be read: File name too long"):
        read_model_config(EngineConfig(model=model))
