"""Check, before anything starts, that this vLLM is one that PipeMax was written for, in what it relies on there.

The scheduler is a subclass that relies on private names; another vLLM may have moved any of them, or calls them with
other parameters. One clear error at start-up is better than wrong tokens later.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import vllm

from pipemax.vllm_ext.seam.relied_on import (
    ATTRIBUTES,
    METHODS,
    TUNABLE_ATTRIBUTES,
    TUNABLE_METHODS,
)
from pipemax.vllm_ext.seam.sources import Sources
from pipemax.vllm_ext.seam.supported import SUPPORTED_VERSIONS


def check_version() -> None:
    """Raise ``ValueError`` on any vLLM but those that this was written for, and on one that is built otherwise."""
    if vllm.__version__.split("+")[0] not in SUPPORTED_VERSIONS:
        raise ValueError(
            f"policy pipemax runs on vLLM {' and '.join(SUPPORTED_VERSIONS)}, this is {vllm.__version__}; policy vllm "
            "runs on any"
        )
    if lacking := _installed_lacks():
        raise ValueError(
            f"policy pipemax needs {', '.join(lacking)} of vLLM, which this build of {vllm.__version__} lacks"
        )


@cache
def _installed_lacks() -> tuple[str, ...]:
    return tuple(lacks(Path(vllm.__file__).parents[1]))


@cache
def installed_lacks_for_tuning() -> tuple[str, ...]:
    """Return what the installed vLLM lacks for its limits to change while it runs; any version may have it."""
    return tuple(lacks(Path(vllm.__file__).parents[1], TUNABLE_METHODS, TUNABLE_ATTRIBUTES))


def lacks(
    root: Path, methods: Mapping[str, str] = METHODS, attributes: Mapping[str, str] = ATTRIBUTES
) -> Iterator[str]:
    """Iterate over what the vLLM in directory ``root`` lacks, or has otherwise than we need it; no import.

    Without the tables, that is what policy pipemax needs.
    """
    sources = Sources(root)
    for owner, lines in methods.items():
        name_of_class = owner.rpartition(".")[2]
        for line in lines.strip().splitlines():
            method, _, rest = line.strip().partition("(")
            wanted = [_names(part) for part in f"({rest}".split("|")]
            there = sources.parameters(owner, method)
            if there is None:
                yield f"{name_of_class}.{method}"
            elif there not in wanted:
                yield f"{name_of_class}.{method}{_shown(wanted[-1])}, which there has {_shown(there)}"
    for owner, names in attributes.items():
        for attribute in names.split():
            if not sources.uses(owner, attribute):
                yield f"{owner.rpartition('.')[2]}.{attribute}"


def _names(parameters: str) -> tuple[str, ...]:
    inner = parameters.strip().removeprefix("(").removesuffix(")")
    return tuple(name.strip() for name in inner.split(",") if name.strip())


def _shown(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"
