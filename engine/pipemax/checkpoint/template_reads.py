"""Find which fields of a message a chat template reads, from the template's syntax tree.

Rendering guesses would miss what stands under a condition, and a search for words would find ``name`` in a template
that reads only a tool's name. So this follows what is a message: the variable ``messages``, what is picked from it by
number, slice, loop or filter, what that is assigned to, and the macros that are called with it. A field is read where
it is taken from such a value, asked for (``in``, ``.get``, ``selectattr``), or where a message is written as a whole.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError, nodes

_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A block of ``transformers``' own, which marks the model's turns for training."""
_WHOLE = {"tojson", "items", "dictsort", "string", "pprint", "xmlattr"}
_OF_FIELD = {"selectattr", "rejectattr", "groupby", "attr"}
"""Filters whose first argument is a field; others name it ``attribute``."""
_NEIGHBOURS = {"previtem", "nextitem"}
_METHODS = {"get", "pop", "setdefault", "items", "values", "keys", "copy", "update"}


@lru_cache(maxsize=64)
def fields_read(template: str) -> frozenset[str] | None:
    """Return the fields of messages that a template reads, or None if it may read any.

    Raise ``ValueError`` if the template cannot be parsed.
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION_TAG.sub("", template))
    except TemplateError as error:
        raise ValueError(f"the chat template cannot be parsed: {error}") from error
    conversation = _Conversation(tree)
    names: set[str] = set()
    for node in tree.find_all(nodes.Node):
        read = conversation.reads(node)
        if read is None:
            return None
        names |= read
    return frozenset(names)


class _Conversation:
    """The variables of a template that hold messages."""

    def __init__(self, tree: nodes.Template) -> None:
        self._names = {"messages"}
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        self._spaces = {
            name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.node, nodes.Call)
            and isinstance(assign.node.node, nodes.Name)
            and assign.node.node.name == "namespace"
            for name in _targets(assign.target)
        }
        before = -1
        while len(self._names) > before:  # until no more are found
            before = len(self._names)
            for node in tree.find_all(nodes.Node):
                self._names |= set(self._made_by(node))

    def reads(self, node: nodes.Node) -> set[str] | None:
        """Return the fields that this expression reads of a message, or None if it reads all of them."""
        match node:
            case nodes.Getattr() if self._holds(node.node):
                return set() if node.attr in _METHODS else {node.attr}
            case nodes.Getitem(arg=nodes.Const(value=str(name))) if self._holds(node.node):
                return {name}
            case nodes.Call(node=nodes.Getattr(attr="get" | "pop" | "setdefault") as method) if self._holds(
                method.node
            ):
                return _texts(node.args[:1])
            case nodes.Call(node=nodes.Getattr(attr="items" | "values") as method) if self._holds(
                method.node
            ):
                return None
            case nodes.Filter() if node.node is not None and self._holds(node.node):
                if node.name in _WHOLE:
                    return None
                named = [pair.value for pair in node.kwargs if pair.key == "attribute"]
                return _texts([*(node.args[:1] if node.name in _OF_FIELD else []), *named])
            case nodes.Compare() if any(
                comparison.op in ("in", "notin") and self._holds(comparison.expr) for comparison in node.ops
            ):
                return _texts([node.expr])
            case nodes.Output() if any(map(self._holds, node.nodes)):
                return None
            case nodes.Concat() if any(map(self._holds, node.nodes)):
                return None
        return set()

    def _made_by(self, node: nodes.Node) -> Iterator[str]:
        """Yield the names that this statement gives a value with messages."""
        match node:
            case nodes.For() if self._holds(node.iter):
                yield from _targets(node.target)
            case nodes.Assign() if self._holds(node.node):
                yield from _targets(node.target)
            case nodes.Call(node=nodes.Name(name="namespace")):
                yield from (f".{pair.key}" for pair in node.kwargs if self._holds(pair.value))
            case nodes.Call(node=nodes.Name(name=name)) if name in self._macros:
                parameters = [parameter.name for parameter in self._macros[name].args]
                arguments = [
                    *zip(parameters, node.args, strict=False),
                    *((pair.key, pair.value) for pair in node.kwargs),
                ]
                yield from (parameter for parameter, value in arguments if self._holds(value))

    def _holds(self, node: Any) -> bool:
        """Tell whether an expression is a message, or several."""
        match node:
            case nodes.Name(name=name):
                return name in self._names
            case nodes.NSRef(attr=attr):
                return f".{attr}" in self._names
            case nodes.Getattr(attr=attr, node=nodes.Name(name=name)):
                # Most loops are over messages; one over parts has no neighbour with a field of a message.
                is_neighbour = name == "loop" and attr in _NEIGHBOURS
                return is_neighbour or (name in self._spaces and f".{attr}" in self._names)
            case nodes.Getitem(arg=nodes.Const(value=str())):
                return False
            case nodes.Getitem(node=inner):
                return self._holds(inner)
            case nodes.Filter(node=inner, name=name):
                return name not in ("length", "count", "tojson", "map", "join") and self._holds(inner)
            case nodes.CondExpr(expr1=first, expr2=second):
                return self._holds(first) or self._holds(second)
            case (
                nodes.Add(left=first, right=second)
                | nodes.Or(left=first, right=second)
                | nodes.And(right=first, left=second)
            ):
                return self._holds(first) or self._holds(second)
            case nodes.List(items=items) | nodes.Tuple(items=items):
                return any(map(self._holds, items))
            case nodes.Call(node=nodes.Getattr(attr="copy", node=inner)):
                return self._holds(inner)
        return False


def _targets(target: nodes.Node) -> Iterator[str]:
    match target:
        case nodes.Name(name=name):
            yield name
        case nodes.NSRef(attr=attr):
            yield f".{attr}"
        case nodes.Tuple(items=items):
            for item in items:
                yield from _targets(item)


def _texts(expressions: list[Any]) -> set[str]:
    return {
        expression.value
        for expression in expressions
        if isinstance(expression, nodes.Const) and isinstance(expression.value, str)
    }
