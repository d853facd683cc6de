"""Other kinds of attention and of weights, under PipeMax: token for token the same as stock vLLM.

Each family's model is made for the test; stock vLLM runs it with its own KV cache manager, which frees what lies before
a window.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.parity.cases import BLOCK_TOKENS, PLAIN, SEEDED, TEMPLATED, Answers, Load, different
from tests.parity.conftest import EngineOf, Reference
from tests.parity.engines import Kind, Setting
from tests.parity.families import ADAPTERS
from tests.parity.faulty_connector import Fault
from tests.parity.test_parity import MIXED, TIGHT, check

GPT_OSS = Kind(family="gpt-oss", pp=2)
MISTRAL = Kind(family="mistral")
GEMMA3 = Kind(family="gemma3")
MISTRAL3 = Kind(family="mistral3")
LLAMA4 = Kind(family="llama4")
DEEPSEEK = Kind(family="deepseek", pp=2)
KINDS = [GPT_OSS, MISTRAL, GEMMA3, MISTRAL3, LLAMA4]
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
QUANTIZED = [
    Kind(family="awq"),
    Kind(family="gptq"),
    pytest.param(
        Kind(family="fp8"),
        marks=pytest.mark.skipif(
            HAS_AMX, reason="on CPUs with AMX, oneDNN's FP8 products take over ten minutes"
        ),
    ),
]

NEAR_TIE = 0.3
"""Difference of logprobs that other batches may make in 16 bits."""


FEW = {"count": 12, "output_tokens": (6, 24)}
"""An engine's start takes longer than these."""

TIGHT_SETTING = Setting(num_batches=3, **TIGHT)
MIXED_SETTING = Setting(num_batches=3, controller=MIXED, **TIGHT)


@pytest.mark.parity_full
@pytest.mark.parametrize(
    ("setting", "load"),
    [
        (TIGHT_SETTING, replace(TEMPLATED, **FEW)),
        (MIXED_SETTING, replace(PLAIN, **FEW)),
        (Setting(num_batches=2, gpu_blocks=18), replace(SEEDED, **FEW)),
    ],
    ids=["templated", "mixed steps", "seeded"],
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_of_a_family_are_those_of_stock_vllm(
    kind: Kind, setting: Setting, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    check(engine_of(kind), setting, load, reference(kind, load))


@pytest.mark.parity_full
@pytest.mark.parametrize("load", [replace(PLAIN, **FEW), replace(SEEDED, **FEW)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", [DEEPSEEK], ids=str)
def test_tokens_of_latent_attention_are_those_of_stock_vllm(
    kind: Kind, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    """In blocks of 16 tokens, so pools hold twice as many; vLLM cuts no prompt on a CPU, and shares no prefix."""
    check(engine_of(kind), Setting(num_batches=3, gpu_blocks=36, host_blocks=96), load, reference(kind, load))


def with_logprobs(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, logprobs=5)


def beyond_near_ties(answers: Answers, expected: Answers) -> list[str]:
    """Return the requests whose first other token stock vLLM found clearly less likely than its own."""
    unlike = []
    for name, stock in expected.items():
        tokens = answers[name].tokens
        differing = [
            place for place, pair in enumerate(zip(tokens, stock.tokens, strict=False)) if len({*pair}) > 1
        ]
        if not differing:
            continue
        logprobs, place = stock.logprobs[differing[0]], differing[0]
        if logprobs[stock.tokens[place]] - logprobs.get(tokens[place], -math.inf) > NEAR_TIE:
            unlike.append(name)
    return unlike


@pytest.mark.parity_full
@pytest.mark.parametrize("kind", QUANTIZED, ids=str)
def test_tokens_of_quantized_weights_are_those_of_stock_vllm_but_for_near_ties(
    kind: Kind, engine_of: EngineOf, reference: Reference
) -> None:
    """The kernels compute in 16 bits, where a batch of other rows may decide between tokens that are all but equal."""
    load = replace(TEMPLATED, choose=with_logprobs, **FEW)
    expected = reference(kind, load)
    engine = engine_of(kind)
    engine.reset(TIGHT_SETTING)
    answers = engine.run(load.make())
    assert engine.counters.evictions > 0
    assert engine.counters.prefetched_blocks > 0
    assert not beyond_near_ties(answers, expected)
    same = [name for name in expected if answers[name].tokens == expected[name].tokens]
    assert len(same) > 0.75 * len(expected)
    engine.reset(Setting(num_batches=3, fault=Fault.CORRUPT))
    assert beyond_near_ties(engine.run(load.make()), expected), "the negative control"


FREED = [
    Kind(family="gpt-oss", pp=2, asynchronous=True, frees_windows=True),
    Kind(family="gpt-oss", pp=2, runner=2, frees_windows=True),
    Kind(family="gemma3", pp=2, frees_windows=True),
    Kind(family="mistral", frees_windows=True),
]


@pytest.mark.parity_full
@pytest.mark.parametrize(
    ("setting", "load"),
    [
        (Setting(num_batches=3, gpu_blocks=24, host_blocks=96), replace(PLAIN, **FEW)),
        (Setting(num_batches=3, controller=MIXED, gpu_blocks=24, host_blocks=96), replace(PLAIN, **FEW)),
        (Setting(num_batches=2, gpu_blocks=24), replace(SEEDED, **FEW)),
    ],
    ids=["phases", "mixed steps", "seeded"],
)
@pytest.mark.parametrize("kind", FREED, ids=str)
def test_tokens_are_those_of_stock_vllm_where_kv_leaves_windows(
    kind: Kind, setting: Setting, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    check(engine_of(kind), setting, load, reference(kind, load))


LORA = Kind(adapters=ADAPTERS)
OF_ADAPTERS = replace(TEMPLATED, adapters=(None, *ADAPTERS, None), **FEW)
"""Rows with the same prefix under different adapters, and without one."""


@pytest.mark.parity_full
@pytest.mark.parametrize(
    "load", [OF_ADAPTERS, replace(SEEDED, adapters=("red",), **FEW)], ids=["by row", "of a job"]
)
@pytest.mark.parametrize("kind", [LORA], ids=str)
def test_tokens_of_adapters_are_those_of_stock_vllm(
    kind: Kind, load: Load, engine_of: EngineOf, reference: Reference
) -> None:
    check(engine_of(kind), TIGHT_SETTING, load, reference(kind, load))


@pytest.mark.parity_full
@pytest.mark.parametrize("kind", [LORA], ids=str)
def test_an_adapter_changes_the_answers(kind: Kind, reference: Reference) -> None:
    red, blue, none = (
        reference(kind, replace(PLAIN, adapters=(adapter,), **FEW)) for adapter in ("red", "blue", None)
    )
    assert len([*different(red, none)]) > len(none) / 2
    assert len([*different(red, blue)]) > len(none) / 2


@pytest.mark.parity_full
@pytest.mark.parametrize("kind", [*KINDS, DEEPSEEK], ids=str)
def test_a_family_s_output_varies_and_a_corrupted_copy_changes_it(
    kind: Kind, engine_of: EngineOf, reference: Reference
) -> None:
    """The negative control."""
    load = replace(PLAIN, **FEW)
    expected = reference(kind, load)
    assert len({token for answer in expected.values() for token in answer.tokens}) > 25
    engine = engine_of(kind)
    engine.reset(
        Setting(num_batches=3, gpu_blocks=24 * BLOCK_TOKENS // kind.block_tokens, fault=Fault.CORRUPT)
    )
    answers = engine.run(load.make())
    assert engine.counters.prefetches > 0
    assert [*different(answers, expected)]
