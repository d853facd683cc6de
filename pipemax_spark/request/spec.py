"""Build and hash the spec, which is everything that decides a row's answer, and compare two specs.

Two rows with equal input under the same ``spec_hash`` are interchangeable. The spec includes the model's content, the
prompt, the time zone if prompts have timestamps, the system message, the schema, the sampling, and the engine settings
that change what the model is, reads or computes, ``dtype`` and ``kv_cache_dtype`` among them. It does not include
parallelism, memory, ``max_model_len``, ``engine_python``, the schedule, and what stands under ``vllm_speed:``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from pipemax.wire import GenerationSpec, PreflightReply
from pipemax_spark.executor.questions import Question
from pipemax_spark.executor.response_format import load_schema
from pipemax_spark.request.prompts import PromptSource

_ENGINE_FIELDS = ("tokenizer", "quantization", "chat", "reasoning_parser", "extra_body")
_VLLM_FIELDS = ("dtype", "kv_cache_dtype")
"""Fields that are also arguments of vLLM, and count like those; a field with the value ``auto`` adds nothing."""
_AUTO = "auto"
_ALWAYS_COUNT = ("system", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "response_format")
"""Settings that count even at their defaults, and come first in this order: the hash depends on both. Later ones do
not count at their defaults, so that older specs keep their hash."""
_DEFAULTS = {setting.name: setting.default for setting in fields(GenerationSpec)}
_SHOWN = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationSpec:
    """One spec; ``values`` is plain JSON, by the names of the command line."""

    model: str
    """The model as the user named it; used in messages, not in the hash."""
    values: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        reply: PreflightReply,
        *,
        source: PromptSource | None,
        generation: GenerationSpec,
        questions: Sequence[Question] = (),
        time_zone: str | None,
        cascade: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build the spec from the checked engine, the prompt source and the generation.

        ``cascade`` is what the spec holds of a small model that may answer too.
        ``reply`` has the model, and the engine's config with its defaults filled in. Without a ``source``, prompts are
        used unchanged. ``time_zone`` is what ``RequestColumns.time_zone`` returns.
        """
        values: dict[str, Any] = {"model": reply.model_fingerprint}
        if source is not None:
            values |= {name: value for name, value in asdict(source).items() if value is not None}
        if questions:
            values["ask"] = {question.name: _question_values(question, generation) for question in questions}
        if time_zone is not None:
            values["time_zone"] = time_zone
        values |= {name: value for name, value in _settings(generation).items() if _counts(name, value)}
        if generation.response_format is not None:
            # Parsed, so that white space does not make another spec. The properties keep their order, because the model
            # writes them in that order.
            values["response_format"] = load_schema(generation.response_format)
        values["engine"] = {
            name: reply.engine[name] for name in _ENGINE_FIELDS if reply.engine.get(name) not in (None, {})
        }
        # Without such arguments nothing is added, so a spec keeps the hash that it had before arguments counted.
        arguments = {name: reply.engine.get(name) for name in _VLLM_FIELDS}
        arguments = {name: value for name, value in arguments.items() if value not in (None, _AUTO)}
        counted = json.loads(json.dumps(arguments | (reply.engine.get("vllm") or {}), sort_keys=True))
        values |= {f"vllm.{name}": value for name, value in counted.items()}
        if cascade is not None:
            values["cascade"] = dict(cascade)
        return cls(model=reply.model, values=json.loads(json.dumps(values)))

    @property
    def hash(self) -> str:
        return hashlib.sha256(_text(self.values).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps({"model": self.model, "values": self.values}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def changes_from(self, old: "AnnotationSpec") -> list[str]:
        """Return a phrase for each value that differs from the old spec's."""
        phrases = []
        for name in [*old.values, *(name for name in self.values if name not in old.values)]:
            before, after = old.values.get(name), self.values.get(name)
            if _text(before) == _text(after):
                continue
            if name == "model":
                before, after = f"{old.model} ({before})", f"{self.model} ({after})"
            phrases.append(f"{name} was {_shown(before)}, is {_shown(after)}")
        return phrases


def _question_values(question: Question, common: GenerationSpec) -> dict[str, Any]:
    """Return the question's template, and its settings that differ from the common ones."""
    settings, others = _settings(question.generation), _settings(common)
    values = {"template": question.template} | {
        name: value for name, value in settings.items() if value != others[name]
    }
    if values.get("response_format") is not None:
        values["response_format"] = load_schema(values["response_format"])
    return values


def _settings(generation: GenerationSpec) -> dict[str, Any]:
    values = asdict(generation)
    return {name: values.pop(name) for name in _ALWAYS_COUNT} | values


def _counts(name: str, value: object) -> bool:
    return value not in (None, ()) and (name in _ALWAYS_COUNT or value != _DEFAULTS[name])


def _text(value: object) -> str:
    # The order of keys matters only in a response format; all other keys are always built in the same order.
    return json.dumps(value, separators=(",", ":"))


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
