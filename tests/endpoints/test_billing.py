"""What a row cost at an endpoint comes with its end, also if it was stopped."""

from pipemax.api import Completion, GenerationRequest, Sampling
from pipemax.endpoint_config import EndpointConfig
from pipemax.endpoints.engine import EndpointEngine
from pipemax.generation import Spent
from tests.endpoints.keys_server import BROKEN, REFUSED, KeysServer, keys_server
from tests.waiting import wait_until

KEY = "sk-canary-0123456789"


def started(server: KeysServer) -> EndpointEngine:
    config = EndpointConfig.parse(server.config(api_key_env="KEY"))
    return EndpointEngine(config.with_keys({"KEY": KEY}))


def ended(engine: EndpointEngine, rows: int) -> dict[str, Completion]:
    completions: list[Completion] = []
    wait_until(
        lambda: len(completions) >= rows or bool(completions.extend(engine.poll(0.1))),
        what="the rows have ended",
    )
    return {completion.request_id: completion for completion in completions}


def test_samples_retries_and_refusals_are_billed_to_their_row() -> None:
    with keys_server(KEY) as server:
        engine = started(server)
        try:
            requests = [
                GenerationRequest(request_id="1:0", prompt="a b c", sampling=Sampling(n=3, temperature=1.0)),
                GenerationRequest(request_id="1:1", prompt=BROKEN),
                GenerationRequest(request_id="1:2", prompt=REFUSED),
                GenerationRequest(request_id="1:3", prompt=" "),
            ]
            engine.submit(requests)
            spent = {name: completion.spent for name, completion in ended(engine, 4).items()}
        finally:
            engine.close()
    assert spent == {
        "1:0": Spent(requests=3, prompt_tokens=9, output_tokens=15),
        "1:1": Spent(requests=2, retries=1, prompt_tokens=3, output_tokens=5),
        "1:2": Spent(requests=1),
        "1:3": Spent(),
    }


def test_a_row_that_is_stopped_ends_with_what_was_asked_for_it() -> None:
    with keys_server(KEY) as server:
        server.refuses_after = 1
        engine = started(server)
        try:
            engine.submit([GenerationRequest(request_id="1:0", prompt=REFUSED)])
            asked = len(server.seen)
            wait_until(
                lambda: len(server.seen) > asked or server.headers_with("Idempotency-Key") > 0,
                what="it is asked",
            )
            engine.abort(["1:0", "unknown"])
            [(name, completion)] = ended(engine, 1).items()
            assert (name, completion.spent) == ("1:0", Spent(requests=1))
            assert completion.error is not None
            engine.submit([GenerationRequest(request_id="1:1", prompt="another")])  # lets the other one go
            assert ended(engine, 1)["1:1"].spent == Spent(requests=1, prompt_tokens=1, output_tokens=3)
        finally:
            engine.close()
