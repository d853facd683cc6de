"""Keeps what looks like a special token in a row as text: a row must not end its turn or speak for the system.

A tokenizer reads ``<|im_end|>`` as one control token wherever it stands, in the chat template's text and in a row's. So
where a row contains such a word, the template is given a mark in its place. The rendered text is cut at the marks, and
each word is tokenized by itself with special tokens turned off. Other rows are tokenized in one piece.

It works with any tokenizer of ``transformers``' interface. It does not know what the tokens mean to a model, and leaves
alone those that the tokenizer itself does not call special (``<think>``, ``<tool_call>``).
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What every tokenizer of ``transformers``' interface has.

    ``added_tokens_decoder`` and ``chat_template`` are looked up at run time, because some tokenizers lack them.
    """

    @property
    def encode(self) -> Callable[..., list[int]]: ...

    @property
    def apply_chat_template(self) -> Callable[..., Any]:
        """Return text with ``tokenize=False``; the type of the result depends on the arguments."""


class SpecialTokens:
    """A tokenizer's special tokens, as words that a text may contain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._ids = {token_id for token_id, token in added.items() if token.special}
        # The longest first: of two words that begin alike, a tokenizer takes the longer one, too.
        self.words = sorted((added[token_id].content for token_id in self._ids), key=len, reverse=True)
        """What the tokenizer reads as a special token wherever a text has it."""
        self._numbers = {word: number for number, word in enumerate(self.words)}
        self._pattern = re.compile("|".join(map(re.escape, self.words)) or "(?!)")

    def mark(self, texts: Sequence[str]) -> tuple[Sequence[str], str | None]:
        """Return the texts with a mark in the place of each special token, and what each mark begins with.

        The number of its word and ``;`` follow. None if the texts have no special tokens.
        """
        if not any(map(self._pattern.search, texts)):
            return texts, None
        # No text contains its own digest, so no row can contain a mark.
        digest = hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()
        marked = [self._pattern.sub(lambda m: f"{digest}-{self._numbers[m[0]]};", text) for text in texts]
        return marked, f"{digest}-"

    def tokenize(self, rendered: str, mark: str, encode: Callable[..., list[int]]) -> list[int]:
        """Return the token ids of a text with marks.

        ``encode`` is the tokenizer's own. Raise ``ValueError`` if it cannot read a word as text.
        """
        token_ids: list[int] = []
        # Cut in this way, every other piece is the number of a word.
        for place, piece in enumerate(re.split(rf"{mark}(\d+);", rendered)):
            if place % 2:
                token_ids += self._as_text(self.words[int(piece)], encode)
            else:
                token_ids += encode(piece, add_special_tokens=False)
        return token_ids

    def _as_text(self, word: str, encode: Callable[..., list[int]]) -> list[int]:
        token_ids = encode(word, add_special_tokens=False, split_special_tokens=True)
        if not self._ids.isdisjoint(token_ids):
            raise ValueError(
                f"it holds {word!r}, which the model's tokenizer can read as a special token only"
            )
        return token_ids
