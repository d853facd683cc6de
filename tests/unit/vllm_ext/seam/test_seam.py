"""Outside of the seam vLLM is imported by its public modules, and none of its private names or versions is used."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import vllm

import pipemax
from pipemax.vllm_ext.seam.sources import Sources

PACKAGE = Path(pipemax.__file__).parent
SEAM = PACKAGE / "vllm_ext" / "seam"
VLLM = Path(vllm.__file__).parent

PUBLIC = {
    "vllm": "parameters of requests",
    "vllm.config": "",
    "vllm.connections": "",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "the base of connectors",
    "vllm.entrypoints.openai.chat_completion.protocol": "what reasoning parsers take",
    "vllm.entrypoints.openai.responses.protocol": "",
    "vllm.entrypoints.pooling.scoring.io_processor": "the processor of pairs of LLM.score",
    "vllm.entrypoints.pooling.typing": "",
    "vllm.exceptions": "",
    "vllm.forward_context": "",
    "vllm.inputs": "",
    "vllm.logprobs": "",
    "vllm.model_executor.model_loader": "the registry of loaders",
    "vllm.model_executor.model_loader.base_loader": "",
    "vllm.model_executor.models.interfaces": "",
    "vllm.multimodal.image": "",
    "vllm.multimodal.media": "",
    "vllm.multimodal.media.image": "",
    "vllm.outputs": "",
    "vllm.reasoning": "",
    "vllm.renderers": "",
    "vllm.renderers.chat_utils": "",
    "vllm.renderers.inputs.preprocess": "",
    "vllm.renderers.params": "",
    "vllm.sampling_params": "",
    "vllm.tasks": "",
    "vllm.utils.mistral": "",
    "vllm.v1.attention.backend": "",
    "vllm.v1.engine.llm_engine": "",
    "vllm.v1.kv_cache_interface": "specifications of KV caches",
    "vllm.v1.metrics.loggers": "the base of loggers",
    "vllm.v1.worker.cpu_worker": "the base of workers",
    "vllm.v1.worker.gpu.model_runner": "",
    "vllm.v1.worker.gpu_worker": "",
    "vllm.v1.worker.worker_base": "",
}
"""Modules of vLLM that may be imported outside of the seam."""

MOST_IMPORTERS = 25


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    """Return the modules of vLLM that a file imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.partition(".")[0] == "vllm"}


def test_outside_of_the_seam_only_public_modules_of_vllm_are_imported() -> None:
    outside = [imported(tree) for path, tree in trees() if SEAM not in path.parents]
    assert set().union(*outside) == PUBLIC.keys()


def test_few_files_import_vllm() -> None:
    importers = [path.name for path, tree in trees() if imported(tree)]
    assert len(importers) <= MOST_IMPORTERS, importers


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_reads(tree: ast.Module) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}


def private_definitions(tree: ast.AST) -> set[str]:
    """Return the private names that classes and their methods define: methods, fields, and attributes of ``self``."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if is_private(name)}


def defined_in_vllm(names: set[str]) -> set[str]:
    """Return those of the names that some class of vLLM's defines."""
    if not names:
        return set()
    either = "|".join(sorted(names))
    pattern = re.compile(rf"def ({either})\(|^ +({either}) *[:=]|\bself\.({either}) *[:=][^=]", re.MULTILINE)
    return {next(filter(None, match.groups())) for text in vllm_sources() for match in pattern.finditer(text)}


@cache
def vllm_sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in VLLM.rglob("*.py")]


def test_no_private_attribute_of_vllm_is_read_outside_of_the_seam() -> None:
    outside = [
        tree for path, tree in trees() if SEAM not in path.parents and PACKAGE / "vllm_ext" in path.parents
    ]
    ours = set().union(*map(private_definitions, outside))
    assert defined_in_vllm(set().union(*map(private_reads, outside)) - ours) == set()


def test_the_search_finds_private_names_of_vllm() -> None:
    names = {"_preempt_request", "_all_token_ids", "_block_hash", "_not_in_any_vllm"}
    assert defined_in_vllm(names) == names - {"_not_in_any_vllm"}


SUBCLASSES = (
    "engine.stat_logger",
    "node_check.random_weights",
    "scheduler.scheduler",
    "scheduler.tunable",
    "worker.connector",
    "worker.cpu_worker",
    "worker.gpu_worker",
    "worker.stage_reports",
)


@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses_outside_of_the_seam_define_no_private_name_of_their_bases(name: str) -> None:
    """Neither to override a method, nor by accident."""
    module, sources = importlib.import_module(f"pipemax.vllm_ext.{name}"), Sources(VLLM.parent)
    classes = [
        kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__
    ]
    bases = {
        f"{base.__module__}.{base.__name__}": kind
        for kind in classes
        for base in kind.__mro__
        if base.__module__.startswith("vllm.")
    }
    assert bases
    for base, kind in bases.items():
        defined = private_definitions(ast.parse(inspect.getsource(kind)))
        assert {private for private in defined if sources.uses(base, private)} == set(), base


def test_no_version_of_vllm_is_named_outside_of_the_seam() -> None:
    version = re.compile(r"vLLM 0\.\d|[\"']0\.3\d|vllm_0\d", re.IGNORECASE)
    named = [
        path.name
        for path in sorted(PACKAGE.rglob("*.py"))
        if SEAM not in path.parents and version.search(path.read_text(encoding="utf-8"))
    ]
    assert named == []
