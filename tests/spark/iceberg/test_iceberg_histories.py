"""Random histories whose outputs are Iceberg tables: see ``tests/spark/test_histories.py``."""

from pathlib import Path
from typing import Any

import pytest

from tests.spark.histories.__main__ import play_seed
from tests.spark.histories.driver import watched

pytestmark = pytest.mark.iceberg


@pytest.mark.parametrize("seed", [0, 1])
def test_after_each_step_of_a_random_history_an_iceberg_output_is_as_the_model_says(
    spark: Any, engine_python: str, catalog: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    with watched():
        play_seed(spark, tmp_path, engine_python, seed, catalog=catalog)
