"""The command behind the tables of results, over little settings: it goes on where it was, and checks what it says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lab.bench.results.__main__ import chosen_groups, main, run_cells, run_pipemax
from lab.bench.results.cells import Cell, System, pipemax_cells, read, stock_cells, write
from lab.bench.results.remaining import Remaining
from lab.bench.results.settings import GROUPS, MAIN, Setting
from lab.bench.results.tables import drawing, print_tables
from pipemax.presets import read_preset


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    """Two GPUs of 7 GB with 4 of 70B's layers each."""
    model = read_preset("models", "llama2-70b") | {"name": "little", "num_layers": 4}
    node = {"name": "pair", "gpu": "L20", "num_gpus": 2, "host_memory_gib": 64}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(node))
    (tmp_path / "little.yaml").write_text(yaml.safe_dump(model))
    return Setting(node=str(tmp_path / "pair.yaml"), model=str(tmp_path / "little.yaml"), rows=60, seeds=(0,))


def finish(setting: Setting, directory: Path) -> list[Cell]:
    """Run what is missing of a setting; return all its cells."""
    directory.mkdir(exist_ok=True)
    first = stock_cells([setting])
    remaining = Remaining(first, directory, num_jobs=1)
    run_cells(first, directory, remaining, 1)
    run_pipemax([setting], directory, remaining, 1)
    assert str(remaining) == "0 minutes left with 1 jobs"
    return [*first, *pipemax_cells([setting], directory)]


def test_a_run_makes_a_file_for_each_cell_and_goes_on_where_it_was(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "cells"
    cells = finish(setting, directory)
    assert {cell.file_name for cell in cells} == {path.name for path in directory.iterdir()}
    assert {cell.system for cell in cells} == {*System}
    assert capsys.readouterr().err.count(" s; ") == len(cells)
    lost = cells[1]
    lost.path(directory).rename(lost.path(directory).with_suffix(".part1"))  # as a killed run leaves it
    finish(setting, directory)
    assert capsys.readouterr().err.count(" s; ") == 1
    assert read(lost, directory)["runs"]
    print_tables({"Little": [setting]}, directory)
    whole, steady = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| pair"))
    assert whole.count("|") == steady.count("|") == 10
    assert "not done" not in whole + steady


def test_all_cells_of_a_table_do_as_many_tokens(setting: Setting, tmp_path: Path) -> None:
    finish(setting, tmp_path / "cells")
    done = drawing(setting, 0, tmp_path / "cells").done
    tokens = {rates["tokens"] for figures in done.values() for rates in figures["runs"].values()}
    assert max(tokens) <= 1.02 * min(tokens)
    assert len({cell.layout for cell in done}) == 3


def test_figures_that_cannot_be_end_the_command(setting: Setting, tmp_path: Path) -> None:
    directory = tmp_path / "cells"
    cells = finish(setting, directory)
    (pipemax,) = (cell for cell in cells if cell.system is System.PIPEMAX)
    right = read(pipemax, directory)

    def faulty(**changes: float) -> None:
        figures = json.loads(json.dumps(right))
        figures["runs"][figures["steady"]] |= changes
        write(pipemax, directory, figures)

    faulty(whole=right["runs"][right["whole"]]["whole"] * 20)
    with pytest.raises(ValueError, match=r"pipemax / stock of .* cannot be"):
        print_tables({"Little": [setting]}, directory)
    faulty(steady=read(Cell(**_stock_of(pipemax)), directory)["bound"] * 1.2)
    with pytest.raises(ValueError, match="above what all KV on GPUs gives"):
        print_tables({"Little": [setting]}, directory)
    faulty(tokens=right["runs"][right["steady"]]["tokens"] // 2)
    with pytest.raises(ValueError, match="cells of one table did"):
        print_tables({"Little": [setting]}, directory)


def _stock_of(cell: Cell) -> dict[str, object]:
    return {"setting": cell.setting, "seed": cell.seed, "system": System.STOCK, "layout": cell.layout}


def test_what_is_not_done_is_said(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_tables({"Little": [setting]}, tmp_path)
    assert capsys.readouterr().out.count("seed 0: stock vLLM is not done") == 2


def test_no_table_has_more_rows_than_it_may_and_no_two_settings_share_files() -> None:
    settings = [setting for group in GROUPS.values() for setting in group]
    assert len({setting.name for setting in settings}) == len(settings)
    long = [setting for setting in settings if setting.rows > 6000]
    assert len(long) == 3
    assert all(setting.rows == 36_000 for setting in long)
    for setting in settings:
        assert setting.node_spec().gpu.mixed_cost == setting.mixed_cost
    assert [setting.node_spec().num_gpus for setting in MAIN] == [2, 4, 8]


def test_settings_are_chosen_by_words_of_their_names(tmp_path: Path) -> None:
    assert [
        setting.rows for setting in chosen_groups(["2xL20--qwen3-32b--sharegpt--36000"])["36,000 rows"]
    ] == [36_000]
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--only", "abacus"])
    assert replace(MAIN[0], mixed_cost=1.5).name == "2xL20--qwen3-32b--sharegpt--6000rows--mixed1.5"
