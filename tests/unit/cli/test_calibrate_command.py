"""``pipemax calibrate``: what is wrong is said before an engine starts, and the picture is drawn."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipemax.cli.app import app
from pipemax.cli.prediction_plot import plot_predictions


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "x.yaml"], "give --model, or --engine with a file that names one"),
        (["--out", "/no/such/place/x.yaml", "--model", "m"], "there is no directory /no/such/place"),
        (["--out", "x.yaml", "--engine", "none.yaml"], "none.yaml"),
    ],
)
def test_wrong_arguments_end_the_command_with_one_line(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 2
    assert told in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_an_engine_config_for_a_pooling_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("model: m\ntask: embed\n")
    result = CliRunner().invoke(
        app, ["calibrate", "--out", "x.yaml", "--engine", str(tmp_path / "engine.yaml")]
    )
    assert result.exit_code == 2
    assert "generates no tokens, so policy pipemax has nothing to schedule" in result.output


def test_predictions_are_drawn_and_kinds_without_steps_left_out(tmp_path: Path) -> None:
    pairs = {"fitted decode": [(0.01, 0.011), (0.02, 0.019)], "mixed decode": []}
    drawn = plot_predictions(pairs, tmp_path / "predictions.png", title="a model on a device")
    assert drawn.read_bytes().startswith(b"\x89PNG")
