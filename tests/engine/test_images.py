"""Images on real vLLM: answers are those of ``LLM.chat``, and a bad image is its row's error."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from vllm import LLM, SamplingParams

from pipemax.config import EngineConfig
from pipemax.generation import Completion, GenerationRequest, Image, Message, Sampling
from pipemax.vllm_ext.engine.vllm_engine import VllmEngine
from pipemax.vllm_ext.launch.vllm_config import engine_args
from pipemax.wire import ErrorCode
from tests.engine.image_model import IMAGE_TOKENS, make_image_model, picture

pytestmark = pytest.mark.long  # another engine; tests/unit shows what becomes of images

RED, BLUE = picture(250, 10, 10), picture(10, 10, 250, kind="JPEG")
QUESTION = "What is on it? "


@dataclass(frozen=True)
class Served:
    """Stock vLLM and our engine, each with a core process."""

    stock: LLM
    engine: VllmEngine
    directory: Path

    def run(self, *requests: GenerationRequest) -> dict[str, Completion]:
        self.engine.submit(requests)
        ended: dict[str, Completion] = {}
        while len(ended) < len(requests):
            ended |= {completion.request_id: completion for completion in self.engine.poll(1.0)}
        return ended


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("images")
    make_image_model(directory / "model")
    config = EngineConfig.parse(
        {
            "model": str(directory / "model"),
            "policy": "vllm",
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "cpu_kv_gib": 0.1,
            "check_at_start": False,
            "images": {
                "max_bytes": 50_000,
                "max_pixels": 1_000_000,
                "max_per_row": 2,
                "directories": [str(directory / "photos")],
            },
        }
    )
    stock = LLM.from_engine_args(engine_args(config))
    engine = VllmEngine(config)
    yield Served(stock, engine, directory)
    engine.close()


def of_message(name: str, *parts: str | Image, tokens: int = 12) -> GenerationRequest:
    message = Message(role="user", content=parts)
    return GenerationRequest(request_id=name, messages=(message,), sampling=Sampling(max_tokens=tokens))


def stock_conversation(*images: bytes) -> list[dict[str, object]]:
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


def test_answers_are_those_of_stock_vllm_and_depend_on_the_image(served: Served) -> None:
    shown = [(RED,), (BLUE,), (RED, BLUE)]
    stock = served.stock.chat(
        [stock_conversation(*images) for images in shown],
        SamplingParams(temperature=0.0, max_tokens=12),
        use_tqdm=False,
    )
    ours = served.run(
        *(
            of_message(str(i), *(Image(content=image) for image in images), QUESTION)
            for i, images in enumerate(shown)
        )
    )
    for i, output in enumerate(stock):
        assert ours[str(i)].error is None
        assert ours[str(i)].text == output.outputs[0].text
        assert ours[str(i)].prompt_tokens == len(output.prompt_token_ids or ())
    assert len({completion.text for completion in ours.values()}) == 3, "each sees its own image"
    assert ours["2"].prompt_tokens == ours["0"].prompt_tokens + IMAGE_TOKENS


def test_an_image_may_be_in_a_file_or_in_a_url_and_the_answer_is_the_same(served: Served) -> None:
    photo = served.directory / "photos" / "a photo.png"
    photo.parent.mkdir(exist_ok=True)
    photo.write_bytes(RED)
    sources = [
        Image(content=RED),
        Image(source=str(photo)),
        Image(source=photo.as_uri()),
        Image(source=f"data:image/png;base64,{base64.b64encode(RED).decode()}"),
    ]
    ended = served.run(*(of_message(str(i), image, QUESTION) for i, image in enumerate(sources)))
    assert all(completion.error is None for completion in ended.values())
    assert len({completion.text for completion in ended.values()}) == 1


def test_a_bad_image_is_the_error_of_its_row_and_of_no_other(served: Served) -> None:
    (served.directory / "photos").mkdir(exist_ok=True)
    (served.directory / "secret.png").write_bytes(RED)
    wide = picture(1, 2, 3, size=(2_000, 600))
    bad = {
        "none": (Image(source=str(served.directory / "photos" / "none.png")), "does not exist"),
        "elsewhere": (Image(source=str(served.directory / "secret.png")), "images.directories"),
        "text": (Image(content=b"no image at all"), "no image of a known format"),
        "cut": (Image(content=RED[: len(RED) // 2]), "cannot be decoded"),
        "wide": (Image(content=wide), "2000 × 600 pixels"),
        "large": (Image(content=RED + bytes(60_000)), "images.max_bytes is 50,000"),
        "web": (Image(source="https://example.org/a.png"), "--allow-image-urls example.org"),
        "bucket": (Image(source="s3://bucket/a.png"), "cannot be read"),
    }
    requests = [of_message(name, image, QUESTION) for name, (image, _) in bad.items()]
    many = of_message("many", *(Image(content=RED),) * 3, QUESTION)
    ended = served.run(*requests, many, of_message("good", Image(content=RED), QUESTION))
    assert ended["good"].error is None
    told = {name: completion.error for name, completion in ended.items() if completion.error is not None}
    assert {error.code for error in told.values()} == {ErrorCode.INVALID_IMAGE}
    assert "images.max_per_row is 2" in told["many"].message
    for name, (_, reason) in bad.items():
        assert reason in told[name].message, told[name].message


def test_a_row_cannot_claim_an_image_by_its_text(served: Served) -> None:
    ended = served.run(
        of_message("one", Image(content=RED), "<image> and </s>"),
        of_message("long", Image(content=RED), "x" * 999),
    )
    assert ended["one"].error is None
    assert ended["one"].prompt_tokens > IMAGE_TOKENS + len("user: assistant: ") // 4
    assert ended["long"].error is not None
    assert ended["long"].error.code == ErrorCode.PROMPT_TOO_LONG


def test_choices_samples_and_further_attempts_see_the_image(served: Served) -> None:
    chosen = GenerationRequest(
        request_id="choice",
        messages=(Message(role="user", content=(Image(content=RED), QUESTION)),),
        sampling=Sampling(choice=("red", "ready", "blue"), logprobs=True),
    )
    again = GenerationRequest(
        request_id="attempts",
        messages=(Message(role="user", content=(Image(content=BLUE), QUESTION)),),
        sampling=Sampling(max_tokens=3, attempts=2, attempts_show_error=True, regex="[0-9]{9,}"),
    )
    ended = served.run(chosen, again)
    assert ended["choice"].error is None
    assert sum(chance for _, chance in ended["choice"].probabilities or ()) == pytest.approx(1.0)
    assert ended["attempts"].attempts == 2
    assert ended["attempts"].error is not None
    assert ended["attempts"].error.code == ErrorCode.RESPONSE_FORMAT
