"""Turn characters of prompts into tokens that the engine's prefix cache holds, by the counts of sampled prompts.

The chat template and the system message are known by the tokens that all prompts begin with; what a chat template puts
behind a prompt counts as the prompt's. The cache holds whole blocks only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

KEPT_TOKENS = 50_000
"""Tokens of prompts that an engine's cache holds at least: an 8B model leaves room for about as many on a 24 GB GPU."""
_BLOCK_TOKENS = 16
"""The size of vLLM's blocks, unless the engine config says another."""
_CHARACTERS_PER_TOKEN = 4.0
"""Of English text, where nothing was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSizes:
    """The sizes of a job's prompts. With questions, a row has as many prompts, which begin with the same text."""

    prompt_tokens: float
    """Mean of a row, over all of its questions."""
    overhead_tokens: float = 0.0
    """Tokens in front of each prompt's text."""
    tokens_per_character: float
    again_tokens: float = 0.0
    """Tokens of a row that its second and later questions find in any case, because the first has left them."""
    block_tokens: int = _BLOCK_TOKENS

    @property
    def kept_rows(self) -> float:
        """The number of rows that the cache holds at least."""
        return KEPT_TOKENS / max(1.0, self.prompt_tokens)

    def tokens(self, characters: float) -> float:
        return characters * self.tokens_per_character

    def fills_a_block(self, text: str) -> bool:
        return self.tokens(len(text)) >= self.block_tokens

    def in_cache(self, characters: float) -> float:
        """Return the tokens that a prompt finds whose first ``characters`` are those of a prompt in the cache."""
        return (self.overhead_tokens + self.tokens(characters)) // self.block_tokens * self.block_tokens

    def share(self, found_tokens: float) -> float:
        """Return the share of a row's tokens, from 0 to 1, if its first prompt finds so many."""
        return min(1.0, (found_tokens + self.again_tokens) / max(1.0, self.prompt_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTokens:
    """What a tokenizer says of sampled prompts."""

    of_prompts: Sequence[int] = ()
    """Of prompts that are no errors; empty if nothing was counted."""
    shared: int = 0
    """Tokens with which all of them begin."""
    block_tokens: int | None = None
    """As the engine config says; None for vLLM's default."""


def sizes_of(
    texts: Sequence[str], counted: CountedTokens, *, questions: Sequence[str] = (), system: str | None = None
) -> PromptSizes:
    """Return the sizes of prompts like these, at least one, without their questions, whose templates follow them."""
    asked, endings = max(1, len(questions)), sum(map(len, questions))
    characters, shared_characters = fmean(map(len, texts)), common_to_all(texts)
    per_character, overhead = 1 / _CHARACTERS_PER_TOKEN, len(system or "") / _CHARACTERS_PER_TOKEN
    if counted.of_prompts:
        differing = asked * (characters - shared_characters) + endings
        tokens = asked * (fmean(counted.of_prompts) - counted.shared)
        per_character = tokens / differing if tokens > 0 and differing > 0 else per_character
        overhead = max(0.0, counted.shared - shared_characters * per_character)
    prompt_tokens = asked * (overhead + characters * per_character) + endings * per_character
    sizes = PromptSizes(
        prompt_tokens=prompt_tokens,
        overhead_tokens=overhead,
        tokens_per_character=per_character,
        block_tokens=counted.block_tokens or _BLOCK_TOKENS,
    )
    return replace(sizes, again_tokens=(asked - 1) * sizes.in_cache(characters))


def common_to_all(texts: Sequence[str]) -> int:
    """Count the characters that all texts begin with."""
    return common(min(texts), max(texts)) if texts else 0


def common(first: str, second: str) -> int:
    """Count the characters that both texts begin with."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
