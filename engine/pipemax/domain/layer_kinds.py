"""The kinds of layers that a model may have next to its usual ones: recurrent mixers, and feed-forward parts of one.

A layer is a mixer (attention to all tokens, attention to a window, or a recurrent one) and a feed-forward part
(experts, or one dense part). Nothing here knows bytes of weights or KV.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pipemax.domain.hardware import check_positive


class Mixer(Enum):
    """How the tokens of a row reach each other in a layer."""

    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"


class LayerKind(NamedTuple):
    """A kind of layer."""

    mixer: Mixer
    is_dense: bool
    """Its feed-forward part is ``DenseLayers``'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayers:
    """The layers of a model with experts that have one larger feed-forward part in their place."""

    layers: tuple[int, ...]
    """By number, from 0."""
    ffn_size: int

    def __post_init__(self) -> None:
        check_positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayers:
    """Layers with a state in place of KV: linear attention, Mamba, short convolutions."""

    layers: tuple[int, ...]
    """By number, from 0."""
    params: int
    """Parameters of one layer's mixer."""
    state_bytes: float
    """Bytes of one row's state in one layer, however long the row is."""

    def __post_init__(self) -> None:
        check_positive(self)
