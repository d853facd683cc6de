"""The command behind the tables of results, over little settings: it goes on where it was, and checks what it says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lab.bench.results.__main__ import chosen_groups, main, run_cells, run_pipemax
from lab.bench.results.cells import Cell, System, pipemax_cells, stock_cells
from lab.bench.results.pays import print_page
from lab.bench.results.remaining import Remaining
from lab.bench.results.settings import GROUPS, MAIN, Setting
from lab.bench.results.store import Store
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


def finish(setting: Setting, store: Store) -> list[Cell]:
    """Run what is missing of a setting; return all its cells."""
    first = stock_cells([setting])
    remaining = Remaining(first, store, num_jobs=1)
    run_cells(first, store, remaining, 1)
    run_pipemax([setting], store, remaining, 1)
    assert str(remaining) == "0 minutes left with 1 jobs"
    return [*first, *pipemax_cells([setting], store)]


def test_a_run_writes_a_line_for_each_cell_and_goes_on_where_it_was(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tables.jsonl"
    cells = finish(setting, Store(file))
    lines = file.read_text().splitlines()
    assert {json.loads(line)["cell"] for line in lines} == {cell.name for cell in cells}
    assert {cell.system for cell in cells} == {*System}
    assert capsys.readouterr().err.count(" s; ") == len(cells)
    file.write_text("\n".join(lines)[:-5])  # as a killed run leaves it
    store = Store(file)
    finish(setting, store)
    assert capsys.readouterr().err.count(" s; ") == 1
    assert [json.loads(line)["cell"] for line in file.read_text().splitlines()] == [
        json.loads(line)["cell"] for line in lines
    ]
    print_tables({"Little": [setting]}, store)
    whole, steady = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| pair"))
    assert whole.count("|") == steady.count("|") == 10
    assert "not done" not in whole + steady
    print_page([setting], store)
    *_, line = capsys.readouterr().out.splitlines()
    assert 0.3 < float(line.split("|")[6]) < 4.0
    assert float(line.split("|")[7]) > 0


def test_all_cells_of_a_table_do_as_many_tokens(setting: Setting, tmp_path: Path) -> None:
    store = Store(tmp_path / "tables.jsonl")
    finish(setting, store)
    done = drawing(setting, 0, store).done
    tokens = {rates["tokens"] for figures in done.values() for rates in figures["runs"].values()}
    assert max(tokens) <= 1.02 * min(tokens)
    assert len({cell.layout for cell in done}) == 3


def test_figures_that_cannot_be_end_the_command(setting: Setting, tmp_path: Path) -> None:
    store = Store(tmp_path / "tables.jsonl")
    cells = finish(setting, store)
    (pipemax,) = (cell for cell in cells if cell.system is System.PIPEMAX)
    right = store[pipemax]

    def faulty(**changes: float) -> None:
        figures = json.loads(json.dumps(right))
        figures["runs"][figures["steady"]] |= changes
        store[pipemax] = figures

    faulty(whole=right["runs"][right["whole"]]["whole"] * 20)
    with pytest.raises(ValueError, match=r"pipemax / stock of .* cannot be"):
        print_tables({"Little": [setting]}, store)
    faulty(steady=store[Cell(**_stock_of(pipemax))]["bound"] * 1.2)
    with pytest.raises(ValueError, match="above what all KV on GPUs gives"):
        print_tables({"Little": [setting]}, store)
    faulty(tokens=right["runs"][right["steady"]]["tokens"] // 2)
    with pytest.raises(ValueError, match="cells of one table did"):
        print_tables({"Little": [setting]}, store)


def _stock_of(cell: Cell) -> dict[str, object]:
    return {"setting": cell.setting, "seed": cell.seed, "system": System.STOCK, "layout": cell.layout}


def test_what_is_not_done_is_said(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_tables({"Little": [setting]}, Store(tmp_path / "none.jsonl"))
    assert capsys.readouterr().out.count("seed 0: stock vLLM is not done") == 2


def test_no_table_has_more_rows_than_it_may_and_no_two_settings_share_names() -> None:
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
