"""Arrange choices by their tokens, so that the model decides only where choices differ.

Each choice is tokenized as the tokenizer writes it. Tokens that all remaining choices share are not generated but put
behind the prompt, and once one choice is left, the answer is known. Where the choices' first tokens differ, as with
most lists of labels, a row costs one token. A constrained decoder that may spell a choice in any other tokens
(``l``, ``ib``, ``s``) gives those spellings some probability too; here each choice has its usual spelling only.

A choice that is the beginning of another one ("lib", "libs") is told apart by the model's end tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Self

MOST_SCORED = 128
"""Maximum branches at one place whose probabilities vLLM returns."""
MOST_ALLOWED = 1_024
"""Maximum branches at one place that vLLM can be told to choose among."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A place where choices part."""

    prefix: tuple[int, ...]
    """The tokens from the answer's beginning that all choices below share."""
    branches: Mapping[int, "int | str"]
    """Next token → the number of the node that it leads to, or the only choice that is left."""


class ChoiceTree:
    """The places where the choices part; node 0 is the first."""

    def __init__(self, choices: tuple[str, ...], nodes: Sequence[Node]) -> None:
        self.choices = choices
        self.nodes = nodes

    @classmethod
    def of(
        cls,
        choices: tuple[str, ...],
        encode: Callable[[str], Sequence[int]],
        end_token_ids: Sequence[int],
        special_words: Collection[str] = (),
    ) -> Self:
        """Build the tree.

        ``ValueError`` if the tokenizer cannot tell two choices apart, or if a choice holds one of its special tokens,
        which are no text that an answer can have.
        """
        by_tokens: dict[tuple[int, ...], str] = {}
        for choice in choices:
            if word := next((word for word in special_words if word in choice), None):
                raise ValueError(
                    f"choice {choice!r} holds {word!r}, a special token of the model; leave it out"
                )
            tokens = tuple(encode(choice))
            if not tokens:
                raise ValueError(f"choice {choice!r} has no tokens")
            if (other := by_tokens.setdefault(tokens, choice)) != choice:
                raise ValueError(f"choices {other!r} and {choice!r} are the same tokens; leave one out")
        nodes: list[Node] = []
        _grow(nodes, by_tokens, tuple(end_token_ids))
        return cls(choices, nodes)

    @property
    def most_branches(self) -> int:
        return max(len(node.branches) for node in self.nodes)

    def probabilities(self, scores: Sequence[Mapping[int, float]]) -> dict[str, float]:
        """Return each choice's probability, given that the answer is one of them.

        ``scores`` has, for each node, the logarithm of the probability of each of its branches' tokens.
        """
        probabilities = dict.fromkeys(self.choices, 0.0)
        shares = [1.0, *[0.0] * (len(self.nodes) - 1)]
        # A node's number is larger than that of the node which leads to it.
        for number, (node, of_node) in enumerate(zip(self.nodes, scores, strict=True)):
            highest = max(of_node[token] for token in node.branches)
            weights = {
                token: 1.0 if highest == -inf else exp(of_node[token] - highest) for token in node.branches
            }
            total = sum(weights.values())
            for token, leads_to in node.branches.items():
                share = shares[number] * weights[token] / total
                if isinstance(leads_to, str):
                    probabilities[leads_to] += share
                else:
                    shares[leads_to] += share
        return probabilities


def _grow(nodes: list[Node], by_tokens: Mapping[tuple[int, ...], str], end: tuple[int, ...]) -> int:
    """Add the node where these choices part, and those below. Return its number."""
    depth = 0
    first = next(iter(by_tokens))
    while depth < len(first) and all(tokens[: depth + 1] == first[: depth + 1] for tokens in by_tokens):
        depth += 1
    number = len(nodes)
    nodes.append(Node(prefix=first[:depth], branches={}))
    groups: dict[int, dict[tuple[int, ...], str]] = defaultdict(dict)
    branches: dict[int, int | str] = {}
    for tokens, choice in by_tokens.items():
        if len(tokens) == depth:
            if not end:
                raise ValueError(f"choice {choice!r} begins another one, and the model has no end token")
            branches |= dict.fromkeys(end, choice)
        else:
            groups[tokens[depth]][tokens] = choice
    for token, group in groups.items():
        branches[token] = next(iter(group.values())) if len(group) == 1 else _grow(nodes, group, end)
    nodes[number] = Node(prefix=first[:depth], branches=branches)
    return number
