"""Tell whether this environment's vLLM runs a model's architecture, in milliseconds: importing vLLM takes ten seconds.

The names stand as literals in vLLM's file of models, which is read and not run. What else vLLM may accept (a model
that transformers implements, code that comes with the checkpoint, models of other plugins) is left to vLLM itself.
"""

import ast
import re
from collections.abc import Sequence
from importlib import metadata

from pipemax.vllm_ext.seam.sources import installed_file

_REGISTRY = "model_executor/models/registry.py"
_TABLES = re.compile(r"_[A-Z_]+_MODELS")
_NOT_RUN = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")
_WITH_MEDIA = "_MULTIMODAL_MODELS"
_ROLE = re.compile(r"(For[A-Z]|Model|LMHead|Embedding).*")
"""The part of a name that says what the model is used for; vLLM converts one use into another."""


def unknown_architecture(architectures: Sequence[str]) -> str | None:
    """Return the first name if vLLM has none of these architectures; ``None`` if it has one or cannot be asked."""
    known = _known_architectures()
    if not known or not architectures or _has_foreign_plugin():
        return None
    stems = {_ROLE.sub("", name) for name in known}
    return None if any(_ROLE.sub("", name) in stems for name in architectures) else architectures[0]


def is_text_only(architectures: Sequence[str]) -> bool:
    """Tell whether vLLM has one of these architectures, and as one that takes neither images nor other media."""
    known, with_media = _known_architectures(), _known_architectures(_WITH_MEDIA)
    return any(name in known for name in architectures) and with_media.isdisjoint(architectures)


def _has_foreign_plugin() -> bool:
    plugins = metadata.entry_points(group="vllm.general_plugins")
    return any(plugin.module.partition(".")[0] not in ("vllm", "pipemax") for plugin in plugins)


def _known_architectures(only: str | None = None) -> set[str]:
    """Return the names in all of vLLM's tables, or in one."""
    module = installed_file(_REGISTRY)
    return {
        key.value
        for statement in (module.body if module else ())
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
        if isinstance(table := statement.targets[0], ast.Name)
        if _TABLES.fullmatch(table.id) and table.id not in _NOT_RUN and only in (None, table.id)
        for key in statement.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
