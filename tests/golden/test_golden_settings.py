"""What a job's options and an engine config mean stays as it was recorded, byte for byte.

The records are never written again: a difference is a table whose rows would all be annotated a second time.
"""

import json

import pytest

from tests.golden.recorded_engines import facts_of, recorded_engines
from tests.golden.recorded_specs import recorded_jobs, spec_of


@pytest.mark.parametrize("name", recorded_jobs())
def test_a_job_has_the_spec_that_was_recorded(name: str) -> None:
    job = recorded_jobs()[name]
    spec = spec_of(job["options"])
    assert json.dumps(spec.values) == json.dumps(job["values"])
    assert spec.hash == job["hash"]


@pytest.mark.parametrize("name", recorded_engines())
def test_an_engine_config_is_read_as_it_was_recorded(name: str) -> None:
    """Fields that are new since have their defaults; none that was recorded is gone or means something else.

    Arguments of vLLM that change no answer have had a place of their own since; both places together are as recorded.
    """
    recorded, now = recorded_engines()[name], facts_of(recorded_engines()[name]["yaml"])
    fields = now["fields"] | {"vllm": now["fields"]["vllm"] | now["fields"]["vllm_speed"]}
    assert {field: fields[field] for field in recorded["fields"]} == recorded["fields"]
    assert now["facts"] == recorded["facts"]
