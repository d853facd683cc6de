"""What follows from equal and unequal answers, in every combination."""

from itertools import product

import pytest

from pipemax.vllm_ext.launch.known_check import CheckPart, NodeCheck, Verdict
from pipemax.vllm_ext.node_check.verdicts import Answer, Run, poison_part, tokens_part

PASSED, FAILED, INCONCLUSIVE = Verdict.PASSED, Verdict.FAILED, Verdict.INCONCLUSIVE


def run(*, changed: int = 0, not_finite: int = 0, prefetches: int = 9) -> Run:
    """Of five prompts ``changed`` have other tokens, and ``not_finite`` have NaN among their log probabilities."""
    answers = [Answer(tokens=(1, 2 + (place < changed)), is_finite=place >= not_finite) for place in range(5)]
    return Run(answers=answers, prefetches=prefetches, moved="9 evictions", least_prefetches=2)


SAME, OTHER = run(), run(changed=2)


@pytest.mark.parametrize(
    ("control", "pipemax", "faulty", "verdict"),
    [
        (SAME, SAME, OTHER, PASSED),
        (SAME, SAME, SAME, INCONCLUSIVE),
        (SAME, OTHER, OTHER, FAILED),
        (SAME, OTHER, SAME, FAILED),
        *((OTHER, pipemax, faulty, INCONCLUSIVE) for pipemax, faulty in product((SAME, OTHER), repeat=2)),
        (SAME, run(prefetches=1), OTHER, INCONCLUSIVE),
        (SAME, run(changed=1, prefetches=1), OTHER, FAILED),
        (SAME, run(not_finite=1), OTHER, FAILED),
    ],
)
def test_tokens_tell_only_where_the_control_is_equal_and_a_fault_is_seen(
    control: Run, pipemax: Run, faulty: Run, verdict: Verdict
) -> None:
    part = tokens_part((SAME, control), {"separated": SAME, "mixed": pipemax}, faulty)
    assert part.verdict is verdict, part.detail


@pytest.mark.parametrize(
    ("control", "poisoned", "verdict"),
    [
        (SAME, SAME, PASSED),
        (SAME, OTHER, FAILED),
        (OTHER, SAME, INCONCLUSIVE),
        (OTHER, OTHER, INCONCLUSIVE),
        (SAME, run(not_finite=1), FAILED),
        (OTHER, run(not_finite=1), FAILED),
        (SAME, run(prefetches=1), INCONCLUSIVE),
        (SAME, run(changed=1, prefetches=1), FAILED),
    ],
)
def test_poison_tells_only_where_the_same_steps_give_the_same_tokens_unless_it_is_read(
    control: Run, poisoned: Run, verdict: Verdict
) -> None:
    part = poison_part((SAME, control), poisoned)
    assert part.verdict is verdict, part.detail


def test_answers_that_are_never_numbers_hide_the_poison() -> None:
    broken = run(not_finite=5)
    assert poison_part((broken, broken), broken).verdict is INCONCLUSIVE


def test_a_part_says_how_many_prompts_it_saw() -> None:
    assert tokens_part((SAME, SAME), {"mixed": OTHER}, OTHER).detail == (
        "prompts that differ from stock vLLM's: 2 of 5 mixed; mixed 9 evictions"
    )
    assert poison_part((SAME, SAME), SAME).detail == "5 of 5 prompts the same as without poison; 9 evictions"


def check(**parts: Verdict) -> NodeCheck:
    return NodeCheck(
        device="d",
        model="m",
        checked="today",
        seconds=1.0,
        parts=tuple(CheckPart(name=name, verdict=verdict, detail="seen") for name, verdict in parts.items()),
    )


@pytest.mark.parametrize(("copies", "poison", "tokens"), list(product(Verdict, repeat=3)))
def test_the_worst_part_decides_and_auto_needs_bytes_and_poison_shown(
    copies: Verdict, poison: Verdict, tokens: Verdict
) -> None:
    result = check(copies=copies, poison=poison, tokens=tokens)
    verdicts = {copies, poison, tokens}
    expected = FAILED if FAILED in verdicts else INCONCLUSIVE if INCONCLUSIVE in verdicts else PASSED
    assert result.verdict is expected
    assert bool(result.refusal()) == (expected is FAILED)
    assert bool(result.warning()) == (expected is INCONCLUSIVE)
    assert bool(result.auto_refusal()) == (FAILED in verdicts or INCONCLUSIVE in {copies, poison})
