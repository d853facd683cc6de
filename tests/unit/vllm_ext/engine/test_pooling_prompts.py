"""What vLLM is asked for a row of a pooling task, by its own renderer, without an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext

from pipemax.config import EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.generation import PAIR, GenerationRequest, Message, RequestError, Sampling
from pipemax.vllm_ext.engine.pooling_engine import PoolingAsk, PoolingPrompts
from pipemax.vllm_ext.launch.engine_room import admission_capacity_tokens
from pipemax.vllm_ext.launch.vllm_config import engine_args
from pipemax.wire import ErrorCode

DEMO_MODEL = Path(__file__).parents[4] / "examples" / "model"
LONGEST = 32


@dataclass(frozen=True)
class LoadedModel:
    """What ``PoolingPrompts`` takes of an engine."""

    renderer: Any
    tasks: tuple[str, ...]

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    config = EngineConfig.parse({"model": str(DEMO_MODEL), "task": "embed", "max_model_len": LONGEST})
    return engine_args(config).create_engine_config(UsageContext.LLM_CLASS)


def prompts(
    vllm_config: Any, task: str, *, tasks: tuple[str, ...] = ("embed", "token_embed")
) -> PoolingPrompts:
    config = EngineConfig.parse({"model": str(DEMO_MODEL), "task": task})
    loaded: Any = LoadedModel(renderer_from_config(vllm_config), tasks)
    return PoolingPrompts(loaded, vllm_config, config)


def pair(query: str, document: str, **settings: Any) -> GenerationRequest:
    messages = tuple(
        Message(role=role, content=text) for role, text in zip(PAIR, (query, document), strict=True)
    )
    return GenerationRequest(request_id="7", messages=messages, sampling=Sampling(task="score", **settings))


def asked(found: list[PoolingAsk] | RequestError) -> list[PoolingAsk]:
    assert isinstance(found, list), found
    return found


def test_an_engine_for_a_pooling_task_takes_requests_without_a_kv_cache(vllm_config: Any) -> None:
    assert vllm_config.model_config.runner_type == "pooling"
    assert vllm_config.model_config.convert_type == "embed"
    assert vllm_config.cache_config.num_gpu_blocks is None
    assert admission_capacity_tokens(vllm_config) > 10_000


def test_an_embedding_models_query_and_document_are_asked_apart(vllm_config: Any) -> None:
    query, document = asked(prompts(vllm_config, "score").asks(pair("a package", "its summary")))
    (single,) = asked(
        prompts(vllm_config, "embed").asks(
            GenerationRequest(request_id="8", prompt="its summary", sampling=Sampling(task="embed"))
        )
    )
    assert document.prompt.token_ids == single.prompt.token_ids
    assert query.prompt.token_ids != document.prompt.token_ids
    assert len({query.ask_id, document.ask_id}) == 2
    assert (query.params.task, single.ask_id) == ("embed", "8")


def test_dimensions_and_normalization_reach_vllm(vllm_config: Any) -> None:
    sampling = Sampling(task="embed", dimensions=8, normalize=False)
    (ask,) = asked(
        prompts(vllm_config, "embed").asks(GenerationRequest(request_id="1", prompt="a", sampling=sampling))
    )
    assert (ask.params.dimensions, ask.params.use_activation) == (8, False)


def test_bad_rows_are_typed_errors(vllm_config: Any) -> None:
    long = "word " * 100
    of_score = prompts(vllm_config, "score")
    found = [
        of_score.asks(each) for each in (pair(" ", "d"), pair("q", long), pair("q", long, truncate=True))
    ]
    codes = [each.code if isinstance(each, RequestError) else None for each in found]
    assert codes == [ErrorCode.EMPTY_PROMPT, ErrorCode.PROMPT_TOO_LONG, None]
    assert max(len(ask.prompt.token_ids) for ask in asked(found[2])) == LONGEST
    chat = (Message(role="user", content="hi"),)
    for task, told in (("score", "takes the messages query and document"), ("embed", "takes a text")):
        request = GenerationRequest(request_id="1", messages=chat, sampling=Sampling(task=task))
        error = prompts(vllm_config, task).asks(request)
        assert isinstance(error, RequestError)
        assert error.code == ErrorCode.INVALID_PROMPT
        assert told in error.message


@pytest.mark.parametrize(
    ("task", "tasks"),
    [
        ("classify", ("embed",)),
        ("embed", ("classify",)),
        ("score", ("token_embed",)),
        ("score", ("token_classify",)),
    ],
)
def test_a_loaded_model_that_cannot_do_the_task_ends_the_start(
    vllm_config: Any, task: str, tasks: tuple[str, ...]
) -> None:
    with pytest.raises(EngineStartError, match=f"cannot do the task {task}; vLLM runs it for {tasks[0]}"):
        prompts(vllm_config, task, tasks=tasks)


def test_a_cross_encoder_with_several_labels_ends_the_start(vllm_config: Any) -> None:
    with pytest.raises(EngineStartError, match="has 2 labels, and a cross-encoder that scores has one"):
        prompts(vllm_config, "score", tasks=("classify",))
