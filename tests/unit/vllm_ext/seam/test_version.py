"""What PipeMax relies on of vLLM is there, with the parameters that it knows; what is not is named."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import vllm

from pipemax.vllm_ext.seam import version
from pipemax.vllm_ext.seam.relied_on import METHODS, TUNABLE_ATTRIBUTES, TUNABLE_METHODS
from pipemax.vllm_ext.seam.version import check_version, installed_lacks_for_tuning, lacks
from tests.unit.vllm_ext.seam.test_seam import SUBCLASSES

ROOT = Path(vllm.__file__).parents[1]

SCHEDULER = "vllm/v1/core/sched/scheduler.py"
RUNNER = "vllm/v1/worker/gpu/states.py"
GPU_WORKER = "vllm/v1/worker/gpu_worker.py"

Changed = Callable[[str, str, str], Path]


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """The installed sources, in one of which a text is replaced by another."""

    def change(file: str, old: str, new: str) -> Path:
        for directory in Path(file).parents[:-1]:
            (tmp_path / directory).mkdir(parents=True, exist_ok=True)
            for source in (ROOT / directory).iterdir():
                if (
                    source.relative_to(ROOT) not in Path(file).parents
                    and not (tmp_path / directory / source.name).exists()
                ):
                    (tmp_path / directory / source.name).symlink_to(source)
        text = (ROOT / file).read_text()
        assert re.search(old, text)
        (tmp_path / file).unlink()
        (tmp_path / file).write_text(re.sub(old, new, text))
        return tmp_path

    return change


def test_the_installed_vllm_has_all_of_it() -> None:
    assert [*lacks(ROOT)] == []
    assert installed_lacks_for_tuning() == ()
    check_version()


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (SCHEDULER, r"def _preempt_request\(", "def _preempt(", "Scheduler._preempt_request"),
        (
            SCHEDULER,
            r"def _free_request\(\s*self, ",
            "def _free_request(self, why, ",
            "Scheduler._free_request(self, request, delay_free_blocks), which there has "
            "(self, why, request, delay_free_blocks)",
        ),
        (SCHEDULER, r"reset_preempted_req_ids", "preempted", "Scheduler.reset_preempted_req_ids"),
        (RUNNER, r"req_id_to_index", "index_of", "RequestState.req_id_to_index"),
        (GPU_WORKER, r"_comm_postprocess", "_after", "AsyncIntermediateTensors._comm_postprocess"),
    ],
)
def test_a_method_or_attribute_that_has_moved_is_named(
    file: str, old: str, new: str, told: str, changed: Changed
) -> None:
    assert [*lacks(changed(file, old, new))] == [told]


def test_a_scheduler_without_a_limit_of_running_rows_cannot_be_tuned_and_runs_pipemax(
    changed: Changed,
) -> None:
    root = changed(SCHEDULER, r"max_num_active_reqs", "most_active")
    assert [*lacks(root, TUNABLE_METHODS, TUNABLE_ATTRIBUTES)] == [
        "Scheduler.max_num_active_reqs",
        "AsyncScheduler.max_num_active_reqs",
    ]
    assert [*lacks(root)] == []


def test_a_vllm_that_is_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "_installed_lacks", lambda: ("KVCacheManager.free",))
    with pytest.raises(
        ValueError, match=r"policy pipemax needs KVCacheManager\.free of vLLM, which this build"
    ):
        check_version()


def test_the_parameters_read_from_the_sources_are_those_of_the_classes() -> None:
    """Python itself is the judge of how sources are read."""
    sources = version.Sources(ROOT)
    read = 0
    for owner, lines in METHODS.items():
        module, _, name = owner.rpartition(".")
        described = getattr(importlib.import_module(module), name)
        for line in lines.strip().splitlines():
            method = line.strip().partition("(")[0]
            found = inspect.getattr_static(described, method)
            function = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
            names = tuple(
                {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(each.kind.name, "") + each.name
                for each in inspect.signature(inspect.unwrap(function)).parameters.values()
            )
            assert sources.parameters(owner, method) == names, f"{owner}.{method}"
            read += 1
    assert read > 60


def overrides() -> list[tuple[type, str, type]]:
    """Return each method of a class of ours that overrides one of vLLM's: our class, the method, vLLM's class."""
    found = []
    for module in ("seam.executor", *SUBCLASSES):
        for ours in vars(importlib.import_module(f"pipemax.vllm_ext.{module}")).values():
            if not inspect.isclass(ours) or not ours.__module__.startswith("pipemax.vllm_ext"):
                continue
            for method in vars(ours):
                owner = next((base for base in ours.__mro__[1:] if method in vars(base)), None)
                if (
                    owner is not None
                    and owner.__module__.startswith("vllm.")
                    and callable(getattr(ours, method))
                ):
                    found.append((ours, method, owner))
    return [each for each in found if not each[1].startswith("__")]


def test_every_method_that_is_overridden_is_in_the_list() -> None:
    known = {
        (owner.rpartition(".")[2], line.strip().partition("(")[0])
        for owner, lines in METHODS.items()
        for line in lines.strip().splitlines()
    }
    found = overrides()
    assert len(found) > 40
    missing = [
        f"{owner.__name__}.{method}" for _, method, owner in found if (owner.__name__, method) not in known
    ]
    assert missing == []
