"""What a job's check tells the user beside its result."""

from pipemax.serve.preflight_checks import preflight
from pipemax.wire import GenerationSpec, PreflightRequest


def test_the_check_names_the_arguments_that_it_moved() -> None:
    engine = {"model": "/no/such/model", "vllm": {"max_num_seqs": 4, "load_format": "dummy"}}
    reply = preflight(PreflightRequest(engine=engine, generation=GenerationSpec()))
    (line,) = reply.warnings
    assert line.startswith("engine config: max_num_seqs under vllm change no answer")
    assert "no/such/model" in reply.error
    assert preflight(PreflightRequest(engine={"model": "/no"}, generation=GenerationSpec())).warnings == []
