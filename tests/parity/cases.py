"""Requests for parity runs: seeded, of many lengths, plain and templated."""

from dataclasses import dataclass
from random import Random

from pipemax.api import Completion, GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 512
_LETTERS = "abcdefghijklmnopqrstuvwxyz ,.;"
HEX_SCHEMA = '{"type": "object", "properties": {"code": {"type": "string", "pattern": "^[0-9a-f]{12}$"}}, '
HEX_SCHEMA += '"required": ["code"], "additionalProperties": false}'


@dataclass(frozen=True, kw_only=True)
class Requests:
    """A reproducible set."""

    count: int = 28
    seed: int = 0
    template_tokens: int = 0
    """Leading characters (a token each) that two of three requests have in common."""
    prompt_tokens: tuple[int, int] = (10, 170)
    output_tokens: tuple[int, int] = (8, 56)
    sampled: bool = False
    """With temperature and a seed each."""
    stop: tuple[str, ...] = ()
    structured: bool = False
    """Every other one must match a schema."""

    def make(self) -> list[GenerationRequest]:
        rng = Random(self.seed)
        template = _text(rng, self.template_tokens)
        requests: list[GenerationRequest] = []
        for index in range(self.count):
            prompt = (template if index % 3 else "") + _text(rng, rng.randint(*self.prompt_tokens))
            sampling = Sampling(
                max_tokens=rng.randint(*self.output_tokens),
                temperature=0.9 if self.sampled else 0.0,
                seed=index if self.sampled else None,
                stop=self.stop,
                response_format=HEX_SCHEMA if self.structured and index % 2 else None,
            )
            requests.append(GenerationRequest(request_id=str(index), prompt=prompt, sampling=sampling))
        return requests


def _text(rng: Random, length: int) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(length))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came back of one set, and what the engine did for it."""

    tokens: dict[str, tuple[int, ...]]
    texts: dict[str, str | None]
    errors: dict[str, str]
    metrics: dict[str, float]
    """Increments of the engine's counts over the run."""

    @property
    def num_distinct_tokens(self) -> int:
        return len({token for tokens in self.tokens.values() for token in tokens})


COUNTS = ("prefetches", "evictions", "prefetched_blocks", "found_blocks", "phase_switches", "decode_steps")


def run(engine: OfflineEngine, requests: list[GenerationRequest]) -> Outcome:
    """All of them at once."""
    before = engine.stats().metrics
    completions: list[Completion] = list(engine.generate(requests))
    after = engine.stats().metrics
    return Outcome(
        tokens={done.request_id: done.token_ids for done in completions},
        texts={done.request_id: done.text for done in completions},
        errors={done.request_id: done.error.message for done in completions if done.error},
        metrics={name: after.get(name, 0.0) - before.get(name, 0.0) for name in COUNTS},
    )


def engine_config(model: str, **values: object) -> EngineConfig:
    """float32, because batches differ and their arithmetic must not."""
    defaults: dict[str, object] = {
        "model": model,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 256,
        "block_size": BLOCK_TOKENS,
        "cpu_kv_gib": 0.25,
        "chat": "never",
        "calibrate_at_start_s": 0,  # seconds for each engine, and poisoned blocks in its copies
    }
    return EngineConfig.parse(defaults | values)
