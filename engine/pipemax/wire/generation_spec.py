"""How the rows of a job are generated."""

import json
from dataclasses import asdict, dataclass, fields

from pipemax.generation import Sampling
from pipemax.wire.row_faults import encodable

_JSON = {"response_format": "JSON schema object", "chat_template_kwargs": "JSON object"}
"""Settings that are JSON, as text, and what each must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec(Sampling):
    """The settings for generating every row of a job.

    With temperature > 0, a row's seed is derived from ``seed`` and the row's prompt.
    """

    system: str | None = None
    """System message to put before every prompt; needs a model with a chat template."""

    def __post_init__(self) -> None:
        """Accept whatever a client sends; ``sampling`` checks it on the engine's side, once per session."""

    def sampling(self) -> Sampling:
        """Return the job's sampling. Raise ``ValueError`` that names the wrong value and the allowed ones."""
        if self.is_pooling and self.system is not None:
            raise ValueError(
                f"task {self.task} holds no conversation, so it takes no system message; put the text into the prompt "
                "template"
            )
        for name, value in asdict(self).items():
            for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
                if name not in _JSON and isinstance(text, str) and encodable(text) != text:
                    raise ValueError(f"{name} has {text!a}, which holds a lone surrogate; leave it out")
        for name, kind in _JSON.items():
            if (text := getattr(self, name)) is None:
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name} is not JSON: {error}") from None
            if not isinstance(value, dict):
                raise ValueError(f"{name} must be a {kind}, not a {type(value).__name__}")
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})
