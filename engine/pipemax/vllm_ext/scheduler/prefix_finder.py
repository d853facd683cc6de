"""Find requests that begin alike: the controller counts a shared prefix once, vLLM knows only content hashes.

Requests whose first block is the same are a family, and what two of its members have in common is taken for the
family's template. Most tables have one template; a wrong one only costs memory in the controller's accounts.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from pipemax.domain.request import PrefixId, SharedPrefix


@dataclass(slots=True)
class _Family:
    hashes: Sequence[bytes]
    """The block hashes of its first member's prompt."""
    num_blocks: int | None = None
    """Length of the template; None while the family has one member."""


class PrefixFinder:
    """Remembers the latest families of prompts."""

    MAX_FAMILIES = 1024

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._families: OrderedDict[bytes, _Family] = OrderedDict()

    def find(self, block_hashes: Sequence[bytes]) -> SharedPrefix | None:
        """Return a new prompt's template, by the hashes of its full blocks (each covers all before it)."""
        if not block_hashes:
            return None
        family = self._families.get(block_hashes[0])
        if family is None:
            self._families[block_hashes[0]] = _Family(tuple(block_hashes))
            if len(self._families) > self.MAX_FAMILIES:
                self._families.popitem(last=False)
            return None
        self._families.move_to_end(block_hashes[0])
        pairs = zip(family.hashes, block_hashes, strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if family.num_blocks is None or family.num_blocks / 2 <= num_common < family.num_blocks:
            family.num_blocks = num_common  # two members may have had more in common than the template
        if num_common < family.num_blocks:
            return None
        return SharedPrefix(
            prefix_id=PrefixId(family.hashes[family.num_blocks - 1].hex()),
            num_tokens=family.num_blocks * self._block_tokens,
        )
