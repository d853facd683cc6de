"""Real vLLM engines with pooling models: their results are those of transformers' own models."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from pipemax.api import Completion, GenerationRequest, Message, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from pipemax.serve.preflight_checks import preflight
from pipemax.wire import PAIR, ErrorCode, GenerationSpec, PreflightReply, PreflightRequest
from tests.engine.conftest import DEFAULTS, DEMO_MODEL
from tests.parity.make_model import VOCABULARY, make_tokenizer

pytestmark = pytest.mark.long  # three more engines

TEXTS = ["a package", "its summary and its description", "a package that holds its own description " * 3]
LONGEST = 64
LABELS = {0: "bad", 1: "so so", 2: "good"}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,  # vLLM has no attention on CPUs for heads of fewer than 32
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 2,
}


def make_bert(directory: Path, labels: dict[int, str]) -> Path:
    """A random BERT that classifies, and a tokenizer that joins two texts."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.BertConfig(**_BERT, id2label=labels, initializer_range=0.5)
    transformers.BertForSequenceClassification(config).float().save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def _core_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts in half the time."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@contextmanager
def started(model: Path, task: str, **settings: object) -> Iterator[OfflineEngine]:
    config = DEFAULTS | {"model": str(model), "task": task, "max_model_len": None} | settings
    with OfflineEngine(EngineConfig.parse(config)) as engine:
        yield engine


def ask(engine: OfflineEngine, rows: Sequence[object], sampling: Sampling) -> list[Completion]:
    """The rows' completions in their order; a pair is a query and a document."""
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt=None if isinstance(row, tuple) else row,  # type: ignore[arg-type]
            messages=tuple(Message(role=r, content=t) for r, t in zip(PAIR, row, strict=True))
            if isinstance(row, tuple)
            else None,
            sampling=sampling,
        )
        for number, row in enumerate(rows)
    ]
    return sorted(engine.generate(requests), key=lambda completion: int(completion.request_id))


def test_a_generating_model_embeds_as_vllm_converts_it() -> None:
    """Its last token's hidden state, of length 1; bad rows are typed errors among good ones."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = transformers.AutoModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with started(DEMO_MODEL, "embed", max_model_len=LONGEST) as engine:
        policy = engine.policy_choice
        rows = ask(engine, [*TEXTS, " ", None, "word " * 200], Sampling(task="embed"))
        raw = ask(engine, TEXTS[:1], Sampling(task="embed", normalize=False))[0]
        cut = ask(engine, ["word " * 200], Sampling(task="embed", truncate=True))[0]
        generates = ask(engine, TEXTS[:1], Sampling())[0]
    assert policy.chosen == "vllm"
    assert "embed generates no tokens" in policy.reason
    for text, row in zip(TEXTS, rows, strict=False):
        tokens = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(values(row), hidden / np.linalg.norm(hidden), atol=2e-5)
        assert (row.prompt_tokens, row.completion_tokens, row.text) == (tokens.input_ids.numel(), 0, None)
    assert [row.error and row.error.code for row in rows[3:]] == [
        *(ErrorCode.EMPTY_PROMPT, ErrorCode.EMPTY_PROMPT, ErrorCode.PROMPT_TOO_LONG)
    ]
    assert np.linalg.norm(values(raw)) != pytest.approx(1.0, abs=1e-3)
    assert (cut.error, cut.prompt_tokens) == (None, LONGEST)
    assert generates.error is not None
    assert "started for embed" in generates.error.message


def values(completion: Completion) -> np.ndarray:
    assert completion.embedding is not None, completion
    return np.frombuffer(completion.embedding, np.float32)


def test_a_classifier_names_the_checkpoints_labels(tmp_path: Path) -> None:
    directory = make_bert(tmp_path, LABELS)
    with started(directory, "classify") as engine:
        rows = ask(engine, [*TEXTS, "word " * 200], Sampling(task="classify"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for text, row in zip(TEXTS, rows, strict=False):
        with torch.no_grad():
            probabilities = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).tolist()
        assert row.probabilities is not None, row
        assert dict(row.probabilities) == pytest.approx(
            dict(zip(LABELS.values(), probabilities, strict=True)), abs=1e-4
        )
        assert row.label == LABELS[int(np.argmax(probabilities))]
    assert rows[3].error is not None
    assert rows[3].error.code == ErrorCode.PROMPT_TOO_LONG


def test_a_cross_encoder_scores_a_query_and_a_document(tmp_path: Path) -> None:
    directory = make_bert(tmp_path, {0: "LABEL_0"})
    pairs = [(query, document) for query in TEXTS[:2] for document in TEXTS[:2]]
    with started(directory, "score") as engine:
        rows = ask(engine, [*pairs, ("a", " "), ("a", "word " * 200)], Sampling(task="score"))
        cut = ask(engine, [("a", "word " * 200)], Sampling(task="score", truncate=True))[0]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for pair, row in zip(pairs, rows, strict=False):
        with torch.no_grad():
            logits = model(**tokenizer(*pair, return_tensors="pt")).logits
        assert row.score == pytest.approx(logits.sigmoid().item(), abs=1e-4)
    assert len({row.score for row in rows[:4]}) == 4  # else an order of the two would not show
    assert [row.error and row.error.code for row in rows[4:]] == [
        ErrorCode.EMPTY_PROMPT,
        ErrorCode.PROMPT_TOO_LONG,
    ]
    assert (cut.error, cut.prompt_tokens) == (None, LONGEST)


def preflight_reply(engine: dict[str, object], **generation: object) -> PreflightReply:
    config = {"model": str(DEMO_MODEL), "max_model_len": LONGEST} | engine
    spec = GenerationSpec(**generation)  # type: ignore[arg-type]
    return preflight(
        PreflightRequest(
            engine=config,
            generation=spec,
            requests=[{"prompt": text} for text in ("a package", None, "word " * 200)],
        )
    )


def test_a_preflight_counts_texts_as_they_are_and_refuses_a_task_that_does_not_fit() -> None:
    tokens = len(transformers.AutoTokenizer.from_pretrained(DEMO_MODEL).encode("a package"))
    reply = preflight_reply({"task": "embed"}, task="embed")
    assert (reply.error, reply.prompt_tokens, reply.first_prompt) == ("", [tokens, 0, 0], "a package")
    assert (reply.row_lengths, reply.expected_rows) == (None, None)
    assert reply.engine["task"] == "embed"
    assert preflight_reply({"task": "embed"}, task="embed", truncate=True).prompt_tokens[2] == LONGEST
    embed, pipemax = {"task": "embed"}, {"task": "embed", "policy": "pipemax"}
    for engine, generation, reason in [
        ({"task": "classify"}, {"task": "classify"}, "has no classes"),
        (embed, {}, "the job's task is generate"),
        (embed, {"task": "embed", "n": 2}, "n has no meaning"),
        (pipemax, embed, "policy pipemax has nothing to schedule"),
    ]:
        assert reason in preflight_reply(engine, **generation).error
