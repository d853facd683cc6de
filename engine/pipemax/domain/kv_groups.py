"""Groups of layers whose KV has block tables of its own, as vLLM's hybrid KV cache manager makes them.

A block of the pool holds some tokens' KV of one group's layers. A row takes blocks in each group: for all of its
tokens where layers have full attention, and for its window where they attend to a window, whose older blocks are freed.
Nothing here knows bytes or pools.

    layers     0 w   1 F   2 w   3 F        groups: full (1, 3), window (0, 2)
    blocks     full    [ 0..16 | 16..32 | 32..48 | 48..64 ]
               window  [ freed | freed  | 32..48 | 48..64 ]   (window of 20 tokens)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipemax.domain.units import ceil_div

_FEW_MORE = 1.5
"""Below this ratio of the layers of two kinds vLLM pads the smaller kind, instead of splitting the larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroups:
    """The number of groups, by kind. The default is whole KV: one group of all layers."""

    full: int = 1
    window: int = 0
    window_tokens: int = 0
    """Of the window groups."""
    fixed_blocks: int = 0
    """Blocks that a row takes whatever its length: the state of recurrent layers, which stock vLLM keeps there too."""

    @property
    def count(self) -> int:
        return self.full + self.window

    def skipped_blocks(self, tokens: int, block_tokens: int) -> int:
        """Return how many leading blocks of a window group the token after these ``tokens`` does not attend to."""
        return max(0, tokens - self.window_tokens + 1) // block_tokens if self.window else 0

    def step_blocks(self, first: int, end: int, block_tokens: int) -> int:
        """Return the blocks of a row in a step that computes its tokens ``[first, end)``.

        What the first of them no longer attends to is free.
        """
        if not self.window:  # what a step asks for each of its rows
            return self.fixed_blocks + self.full * -(-end // block_tokens)
        skipped = self.skipped_blocks(first, block_tokens)
        return self.fixed_blocks + self.count * ceil_div(end, block_tokens) - self.window * skipped

    def running_blocks(self, tokens: int, block_tokens: int) -> int:
        """Return the blocks of a row that decodes, with KV of this many tokens, before its next step."""
        return self.step_blocks(tokens - 1, tokens, block_tokens)

    def kept_blocks(self, tokens: int, block_tokens: int) -> int:
        """Return the blocks that the steps after these ``tokens`` need of a row."""
        return self.step_blocks(tokens, tokens, block_tokens)

    def fitting_tokens(self, first: int, num_blocks: int, block_tokens: int) -> int:
        """Return the end of the longest step that begins with token ``first`` and takes at most ``num_blocks``."""
        skipped = self.skipped_blocks(first, block_tokens)
        return (num_blocks - self.fixed_blocks + self.window * skipped) // self.count * block_tokens

    def prompt_blocks(self, tokens: int, block_tokens: int, *, in_flight_tokens: int) -> int:
        """Return the most blocks that a prompt holds while it is computed, for which vLLM asks before it starts one.

        Steps in flight compute up to ``in_flight_tokens``, whose windows are still needed. With none, these are the
        most that a row of this length ever takes, if its prompt is computed in small parts.
        """
        num_blocks = ceil_div(tokens, block_tokens)
        window_blocks = ceil_div(self.window_tokens - 1 + in_flight_tokens, block_tokens) + 1
        return self.fixed_blocks + self.full * num_blocks + self.window * min(num_blocks, window_blocks)


WHOLE_KV = KvGroups()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLayers:
    """The layers of each group, by number."""

    full: tuple[tuple[int, ...], ...]
    window: tuple[tuple[int, ...], ...]

    def tables(self, window_tokens: int) -> KvGroups:
        """Return the block tables of a row, where windows have this many tokens."""
        return KvGroups(full=len(self.full), window=len(self.window), window_tokens=window_tokens)

    def most_layers(self, first: int, end: int) -> int:
        """Return the layers of ``[first, end)`` in the group that has the most of them: a block has room for these."""
        return max(sum(first <= layer < end for layer in group) for group in (*self.full, *self.window))


def group_layers(num_layers: int, full_layers: Sequence[int]) -> GroupedLayers:
    """Group a model's layers, of which those that are not in ``full_layers`` have one window.

    All groups have the same number of layers, except that some may lack one or more.
    """
    windowed = [layer for layer in range(num_layers) if layer not in set(full_layers)]
    kinds = [sorted(full_layers), windowed]
    sizes = [len(kind) for kind in kinds if kind]
    size = max(sizes) if max(sizes) < _FEW_MORE * min(sizes) else min(sizes)
    full, window = (_split(kind, ceil_div(len(kind), size)) for kind in kinds)
    return GroupedLayers(full=full, window=window)


def _split(layers: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Deal layers out in turn, so that each pipeline stage has about as many of each group."""
    return tuple(tuple(layers[index::count]) for index in range(count))
