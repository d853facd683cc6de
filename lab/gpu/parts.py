"""Say which parts the proof has, what each needs, and how it is started. Groups are parts that fit into one limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.gpu.models import make_check_engine

_END_MARGIN_S = 12.0
"""A part that knows its limit ends itself so long before it would be ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    out: Path
    """For what is kept."""
    scratch: Path
    """For models and caches; removed at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    expected_s: float
    """On an H100."""
    gigabytes: float
    """Of GPU memory that it needs."""
    modules: tuple[str, ...]
    arguments: Callable[[Places, float], list[str]]
    """For Python, from the places and the seconds left."""
    says: str = ""
    """The last line of output that begins with this is the part's summary."""


def _tests(places: Places, left_s: float) -> list[str]:
    return ["-m", "pytest", "-q", "tests/gpu"]


def _link(places: Places, left_s: float) -> list[str]:
    return _with_limit("lab.gpu.link", left_s, "--json", str(places.out / "link.json"))


def _check_node(places: Places, left_s: float) -> list[str]:
    return ["-m", "pipemax", "check-node", "--engine", str(make_check_engine(places.scratch))]


def _transfer(places: Places, left_s: float) -> list[str]:
    given = ["--host-blocks", "8000", "--repeats", "5"]
    return ["lab/bench/transfer.py", *given, "--json", str(places.out / "transfer.json")]


def _engines(module: str, directory: str) -> Callable[[Places, float], list[str]]:
    """Return what makes the arguments of a run of engines, which keeps its logs and figures in that directory."""
    return lambda places, left_s: _with_limit(module, left_s, "--out", str(places.out / directory))


def _with_limit(module: str, left_s: float, *arguments: str) -> list[str]:
    return ["-m", module, *arguments, "--seconds", f"{max(1.0, left_s - _END_MARGIN_S):.0f}"]


_TEST_MODULES = ("cuda.core", "hypothesis", "numpy", "pytest", "pytest_timeout")
PARTS = {
    part.name: part
    for part in (
        Part(name="tests", expected_s=30, gigabytes=1, modules=_TEST_MODULES, arguments=_tests),
        Part(
            name="parity",
            expected_s=150,
            gigabytes=40,
            modules=("vllm", "triton"),
            arguments=_engines("lab.gpu.parity", "parity"),
        ),
        Part(name="link", expected_s=25, gigabytes=4, modules=("cuda.bindings", "triton"), arguments=_link),
        Part(
            name="check-node",
            expected_s=195,  # 251 on 2026-11-27, of which 80 for a core that is killed after 18 now
            gigabytes=40,
            modules=("vllm",),
            arguments=_check_node,
            says="verdict",
        ),
        Part(
            name="transfer",
            expected_s=60,
            gigabytes=35,
            modules=("cuda.bindings", "triton", "yaml"),
            arguments=_transfer,
        ),
        Part(
            name="stage-of-eight",
            expected_s=200,
            gigabytes=40,
            modules=("vllm", "triton"),
            arguments=_engines("lab.gpu.stage_of_eight", "stage-of-eight"),
        ),
        Part(
            name="stage-of-two",
            expected_s=150,
            gigabytes=48,
            modules=("vllm", "triton"),
            arguments=_engines("lab.gpu.stage_of_two", "stage-of-two"),
        ),
        Part(
            name="tuning",
            expected_s=190,
            gigabytes=40,
            modules=("vllm", "triton"),
            arguments=_engines("lab.gpu.tuning", "tuning"),
        ),
    )
}
GROUPS = {
    "correct": ("tests", "parity", "link", "check-node"),
    "speed": ("transfer", "stage-of-eight", "stage-of-two"),
}


def chosen_parts(names: Sequence[str]) -> list[Part]:
    """Return the parts of these groups and parts. ``ValueError`` names one that does not exist."""
    chosen: list[Part] = []
    for name in names:
        if name not in GROUPS and name not in PARTS:
            raise ValueError(f"unknown part {name}: give {', '.join((*GROUPS, *PARTS))}")
        chosen += [PARTS[part] for part in GROUPS.get(name, (name,)) if PARTS[part] not in chosen]
    return chosen
