"""What a run costs: the cluster's hours by ``--price-per-hour``, an endpoint's tokens by its engine config's prices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pipemax.wire import Spent

_MILLION = 1_000_000
_OF_PROMPTS, _OF_OUTPUTS = "price_per_million_prompt_tokens", "price_per_million_output_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of a run, in one currency; None for what has none."""

    per_hour: float | None = None
    """Of the whole cluster."""
    per_million_prompt_tokens: float | None = None
    per_million_output_tokens: float | None = None

    @classmethod
    def of(cls, per_hour: float | None, engine: Mapping[str, Any]) -> Self:
        """Return the prices of a job. A price in the engine config that is no number counts as none: it is refused."""
        per_prompt, per_output = (
            float(price) if isinstance(price := engine.get(name), int | float) else None
            for name in (_OF_PROMPTS, _OF_OUTPUTS)
        )
        return cls(
            per_hour=per_hour, per_million_prompt_tokens=per_prompt, per_million_output_tokens=per_output
        )

    @property
    def per_second(self) -> float:
        return (self.per_hour or 0.0) / 3600

    @property
    def has_tokens(self) -> bool:
        """Whether tokens cost anything."""
        return bool(self.per_million_prompt_tokens or self.per_million_output_tokens)

    @property
    def are_known(self) -> bool:
        """Whether there is any price, 0 among them."""
        prices = (self.per_hour, self.per_million_prompt_tokens, self.per_million_output_tokens)
        return any(price is not None for price in prices)

    def of_tokens(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return what tokens cost."""
        of_prompts = prompt_tokens * (self.per_million_prompt_tokens or 0.0)
        return (of_prompts + output_tokens * (self.per_million_output_tokens or 0.0)) / _MILLION

    def cost(self, *, seconds: float, spent: Spent) -> float:
        """Return what a run costs that took so long and was billed for these tokens."""
        return seconds * self.per_second + self.of_tokens(spent.prompt_tokens, spent.output_tokens)

    def __str__(self) -> str:
        """Return the prices in words."""
        parts = [] if self.per_hour is None else [f"{self.per_hour:,.2f} an hour"]
        for price, what in (
            (self.per_million_prompt_tokens, "prompt"),
            (self.per_million_output_tokens, "output"),
        ):
            if price is not None:
                parts.append(f"{price:,g} per million {what} tokens")
        return ", ".join(parts)
