"""Requests for parity runs: seeded, of many lengths, plain and templated, with every way of choosing tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 512
FIRST_TOKEN = 3  # behind the special ones
VOCABULARY = 512
HEX_SCHEMA = '{"type": "object", "properties": {"code": {"type": "string", "pattern": "^[0-9a-f]{12}$"}}, '
HEX_SCHEMA += '"required": ["code"], "additionalProperties": false}'


@dataclass(frozen=True, kw_only=True)
class Request:
    """One row for vLLM itself: what it can, policy pipemax must."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None


Choose = Callable[[int], SamplingParams]


def greedy(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.0)


def seeded(index: int) -> SamplingParams:
    match index % 4:
        case 0:
            return SamplingParams(temperature=0.9, seed=index)
        case 1:
            return SamplingParams(temperature=0.9, seed=index, top_k=20)
        case 2:
            return SamplingParams(temperature=0.9, seed=index, top_p=0.8)
        case _:
            return SamplingParams(temperature=0.9, seed=index, top_k=50, top_p=0.9, min_p=0.01)


def everything(index: int) -> SamplingParams:
    """Greedy in one way or another, so that both runners agree."""
    match index % 8:
        case 0:
            return SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.7)
        case 1:
            return SamplingParams(
                temperature=0.0, structured_outputs=StructuredOutputsParams(json=HEX_SCHEMA)
            )
        case 2:
            return SamplingParams(temperature=0.0, repetition_penalty=1.6)
        case 3:
            return SamplingParams(temperature=0.0, logprobs=3)
        case 4:
            return SamplingParams(temperature=0.0, stop=["e", "qu"], stop_token_ids=[7, 200])
        case 5:
            return SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                repetition_detection=RepetitionDetectionParams(
                    max_pattern_size=8, min_pattern_size=1, min_count=2
                ),
            )
        case 6:
            return SamplingParams(temperature=0.0, presence_penalty=-1.5, bad_words=["e", "th"])
        case _:
            return SamplingParams(temperature=0.0, ignore_eos=True, min_tokens=5)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A reproducible set of requests."""

    count: int = 28
    seed: int = 0
    template_tokens: int = 0
    """Leading tokens that two of three requests have in common."""
    prompt_tokens: tuple[int, int] = (10, 170)
    output_tokens: tuple[int, int] = (8, 56)
    choose: Choose = greedy
    adapters: tuple[str | None, ...] = (None,)
    """Which rows take in turn."""

    def make(self) -> list[Request]:
        rng = Random(self.seed)
        template = _tokens(rng, self.template_tokens)
        requests: list[Request] = []
        for index in range(self.count):
            own = _tokens(rng, rng.randint(*self.prompt_tokens))
            params = self.choose(index)
            params.max_tokens = rng.randint(*self.output_tokens)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            prompt = (template if index % 3 else ()) + own
            adapter = self.adapters[index % len(self.adapters)]
            requests.append(Request(id=str(index), prompt=prompt, params=params, adapter=adapter))
        return requests


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count))


PLAIN = Load()
TEMPLATED = Load(seed=1, template_tokens=150)
SEEDED = Load(seed=2, choose=seeded)
EVERYTHING = Load(seed=3, choose=everything, output_tokens=(20, 60))
LONG = Load(seed=5, count=8, prompt_tokens=(300, 440), output_tokens=(20, 60))
LOADS = {
    "plain": PLAIN,
    "templated": TEMPLATED,
    "seeded": SEEDED,
    "everything": EVERYTHING,
    "long": LONG,
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a request got."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[dict[int, float], ...] = ()
    """By position: token → logprob, of those asked for and the chosen one."""

    def differs_from(self, other: "Answer") -> bool:
        """Logprobs are sums over other batches: equal but for rounding."""
        same = (self.tokens, self.text, self.finish_reason) == (other.tokens, other.text, other.finish_reason)
        return not same or any(
            mine.keys() != theirs.keys() or any(abs(mine[token] - theirs[token]) > 1e-3 for token in mine)
            for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
        )


Answers = dict[str, Answer]


def different(answers: Answers, expected: Answers) -> Iterator[str]:
    """What is wrong with the answers, request by request."""
    for name in answers.keys() | expected.keys():
        if name not in answers or name not in expected:
            yield f"request {name} is in one of the two only"
        elif answers[name].differs_from(expected[name]):
            yield f"request {name}: {answers[name]}, not {expected[name]}"
