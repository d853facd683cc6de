"""Remembered tunings: kept, found for a table of a near kind, and ignored where the file is damaged."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipemax.domain.step_records import StepLimits
from pipemax.tuning.race import Estimate
from pipemax.tuning.remembered import Entry, TableKind, keep_entry, kind_of, load_entries, nearest_entry
from pipemax.tuning.step_fit import WorkCosts
from pipemax.tuning.table import Lengths
from pipemax.tuning.tuned import Tuned

KIND = TableKind(mean_prompt=1000.0, mean_output=100.0, prompt_spread=300.0, shared_share=0.1)
TUNED = Tuned(
    limits=StepLimits(step_tokens=8192, running_rows=640),
    is_default=False,
    gain=Estimate(mean=0.0305, low=0.012, high=0.0488),
    predicted_gain=0.02,
    seconds=360.0,
    pairs=9,
    why="it was shown to be faster",
)


def entry(kind: TableKind = KIND, *, rows: int = 640) -> Entry:
    made = Entry.of(
        TUNED,
        kind,
        WorkCosts(prompt_token_s=1e-5, decode_s=2e-5, kv_token_s=1e-9, prompts_per_output=10.0),
        date="2026-11-27",
    )
    return replace(made, limits=StepLimits(step_tokens=8192, running_rows=rows))


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "tunings" / "model--0123.yaml"
    assert load_entries(path) == []
    keep_entry(path, entry())
    keep_entry(path, replace(entry(replace(KIND, mean_prompt=100.0)), gain=None))
    assert load_entries(path) == [entry(), replace(entry(replace(KIND, mean_prompt=100.0)), gain=None)]
    assert [one.name for one in path.parent.iterdir()] == [path.name], "no draft is left"


def test_a_later_tuning_of_the_same_kind_replaces_the_earlier(tmp_path: Path) -> None:
    path = tmp_path / "model--0123.yaml"
    keep_entry(path, entry())
    keep_entry(path, entry(replace(KIND, mean_prompt=1100.0), rows=512))
    (kept,) = load_entries(path)
    assert kept.limits.running_rows == 512


@pytest.mark.parametrize(
    ("kind", "is_near"),
    [
        (replace(KIND, mean_prompt=1900.0), True),
        (replace(KIND, mean_prompt=2100.0), False),
        (replace(KIND, mean_output=49.0), False),
        (replace(KIND, shared_share=0.5), False),
        (replace(KIND, is_constrained=True), False),
        (replace(KIND, has_lora=True), False),
        (replace(KIND, has_images=True), False),
    ],
)
def test_a_kind_within_an_octave_is_near(kind: TableKind, is_near: bool) -> None:
    assert (nearest_entry([entry()], kind) is not None) is is_near


def test_the_nearest_of_two_kinds_is_taken() -> None:
    entries = [entry(replace(KIND, mean_prompt=600.0)), entry(replace(KIND, mean_prompt=1100.0), rows=512)]
    nearest = nearest_entry(entries, KIND)
    assert nearest is not None
    assert nearest.limits.running_rows == 512


@pytest.mark.parametrize("text", ["{", "- 3", "a: b", "- {kind: {}}", "\x00", "- []"])
def test_a_damaged_file_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "model--0123.yaml"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_entries(path) == []
    (record,) = caplog.records
    assert "cannot be read" in record.getMessage()
    assert "\n" not in record.getMessage()
    caplog.clear()
    keep_entry(path, entry())
    assert load_entries(path) == [entry()]


def test_a_file_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_text("")
    keep_entry(tmp_path / "taken" / "model.yaml", entry())
    assert "cannot be kept" in caplog.text


def test_the_kind_of_a_table_is_its_lengths() -> None:
    lengths = Lengths(
        prompt_tokens=np.array([100, 300]),
        output_tokens=np.array([10, 30]),
        found_tokens=np.array([50, 50]),
    )
    assert kind_of(lengths, has_lora=True) == TableKind(
        mean_prompt=200.0, mean_output=20.0, prompt_spread=100.0, shared_share=0.25, has_lora=True
    )


def test_a_tuning_is_said_in_one_line() -> None:
    assert str(TUNED) == "Tuned: steps of 8,192, 640 rows; +3.1 % (1.2 … 5.0) over vLLM's default; 6 min"
    simulated = replace(TUNED, gain=None, predicted_gain=0.06, seconds=70.0)
    assert str(simulated).endswith("rows; +6.2 % (simulated, not raced) over vLLM's default; 70 s")
    default = replace(TUNED, is_default=True, why="every rival was slower")
    assert str(default) == "Tuned: steps of 8,192, 640 rows, vLLM's default: every rival was slower; 6 min"
