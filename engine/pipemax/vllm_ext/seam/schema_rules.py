"""Tell which JSON schemas vLLM refuses for a backend, before it asks the backend itself.

That stands in vLLM's source, which is read here: importing vLLM takes ten seconds.
"""

import __future__

import ast
from collections.abc import Callable
from functools import cache
from typing import Any

from pipemax.vllm_ext.seam.sources import installed_file

_SOURCES = {
    "xgrammar": ("backend_xgrammar.py", "has_xgrammar_unsupported_json_features"),
    "guidance": ("backend_guidance.py", "has_guidance_unsupported_json_features"),
}


def is_refused(backend: str, schema: Any) -> bool:
    """Tell whether vLLM refuses the schema for this backend before it asks the backend itself."""
    rule = _rule(*_SOURCES[backend])
    return rule is not None and bool(rule(schema))


@cache
def _rule(file: str, name: str) -> Callable[[Any], bool] | None:
    """Return vLLM's function, with the helpers and constants of its file; ``None`` if this vLLM has none."""
    module = installed_file(f"v1/structured_output/{file}")
    if module is None:
        return None
    rules = [
        node for node in module.body if isinstance(node, ast.FunctionDef) and "json_features" in node.name
    ]
    helpers = [
        node
        for node in module.body
        if (isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.decorator_list)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Set))
    ]
    names: dict[str, Any] = {}
    # Without its annotations: their names are not in this module.
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module([*helpers, *rules], type_ignores=[]), file, "exec", flags), names)
    return names.get(name)
