"""An engine's limits are tuned while it serves: by its own rows, for one kind of table, and remembered."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from pipemax.api import Completion, Engine, EngineStats, GenerationRequest, Image, Message, Sampling
from pipemax.config import EngineConfig
from pipemax.domain.step_records import StepLimits, StepRecords, TuningFacts, check_limits
from pipemax.serve.flow.live_tuning import LiveTuning
from pipemax.serve.flow.open_input import InputWatch
from pipemax.wire import JobOutlook
from tests.unit.tuning.synthetic_engine import (
    CEILING,
    DEFAULT,
    SyntheticEngine,
    compute_bound,
    envelope,
    memory_bound,
)

CONFIG = EngineConfig(model="model")


class ServedEngine:
    """A synthetic engine as the server sees one; it runs for about a second in each ``run``."""

    def __init__(
        self, kept_in: Path, *, is_compute_bound: bool = False, has_fixed_limits: bool = False
    ) -> None:
        self.synthetic = SyntheticEngine(compute_bound if is_compute_bound else memory_bound)
        self._kept_in = kept_in
        self._most = [] if has_fixed_limits else [CEILING]
        self._records = [StepRecords.none()]
        self.tried: list[StepLimits] = []

    def run(self) -> list[Completion]:
        records, lengths = self.synthetic.advance()
        self._records = [StepRecords.joined([*self._records, records])]
        pairs = zip(lengths.prompt_tokens, lengths.output_tokens, strict=True)
        return [
            Completion(request_id=str(n), prompt_tokens=int(prompt), completion_tokens=int(output))
            for n, (prompt, output) in enumerate(pairs)
        ]

    def most_limits(self) -> list[StepLimits]:
        return self._most

    def limits(self) -> list[StepLimits]:
        return [self.synthetic.limits]

    def set_limits(self, limits: Sequence[StepLimits]) -> None:
        check_limits(limits, self._most)
        self.synthetic.limits = limits[0]
        self.tried += limits

    def take_step_records(self) -> list[StepRecords]:
        records, self._records = self._records, [StepRecords.none()]
        return records

    def tuning_facts(self) -> TuningFacts | None:
        if not self._most:
            return None
        capacity = envelope().capacity
        return TuningFacts(
            kv_blocks=capacity.gpu_blocks, block_tokens=capacity.block_tokens, kept_in=str(self._kept_in)
        )

    def stats(self) -> EngineStats:
        return EngineStats(running_requests=64, waiting_requests=500)


class Server:
    """The tuning and the streams around one engine."""

    def __init__(self, engine: ServedEngine, config: EngineConfig = CONFIG) -> None:
        self.engine = engine
        self._config = config
        self.inputs = InputWatch(lambda job_id: 0, clock=lambda: engine.synthetic.now_s)
        self.tuning = LiveTuning(self.inputs, clock=lambda: engine.synthetic.now_s)
        self._number = 0

    def open(self, job_id: str, *, rows_left: int | None) -> None:
        self.close()
        self._job_id = job_id
        self.inputs.open(self._number, job_id)
        if rows_left is not None:
            self.inputs.hear(JobOutlook(job_id=job_id, rows_left=rows_left, engines=1))

    def close(self) -> None:
        if self._number:
            self.inputs.close(self._number, self._job_id)
        self._number += 1

    def run(self, seconds: float) -> None:
        end_s = self.engine.synthetic.now_s + seconds
        while self.engine.synthetic.now_s < end_s:
            self.tuning.learn(self.engine.run())
            self.tuning.see(cast("Engine", self.engine), self._config)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server whose engine has tuned itself on a long table."""
    server = Server(ServedEngine(tmp_path_factory.mktemp("cache") / "tunings" / "model.yaml"))
    server.open("long", rows_left=1_000_000)
    server.run(1000)
    return server


def test_a_long_table_ends_with_limits_that_are_faster_and_says_so(tuned: Server) -> None:
    engine = tuned.engine.synthetic
    assert engine.rate(engine.limits) > 1.5 * engine.rate(DEFAULT)
    assert tuned.tuning.note.startswith("Tuned: steps of ")
    assert "over vLLM's default" in tuned.tuning.note


def test_another_table_of_the_kind_starts_with_them_on_a_new_engine(tuned: Server) -> None:
    facts = tuned.engine.tuning_facts()
    assert facts is not None
    (entry,) = yaml.safe_load(Path(facts.kept_in).read_text(encoding="utf-8"))
    fresh = Server(ServedEngine(Path(facts.kept_in)))
    fresh.open("next", rows_left=1_000_000)
    fresh.run(300)
    assert {*fresh.engine.tried} == {DEFAULT, StepLimits(**entry["limits"])}
    assert fresh.engine.synthetic.limits == StepLimits(**entry["limits"])
    assert fresh.tuning.note, "two pairs have checked it"


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(
            GenerationRequest(request_id="0", prompt="x", sampling=Sampling(choice=("a", "b"))), id="choices"
        ),
        pytest.param(
            GenerationRequest(request_id="0", messages=(Message(role="user", content=(Image(source="x"),)),)),
            id="images",
        ),
    ],
)
def test_a_table_whose_rows_are_of_another_kind_does_not_take_them_over(
    tuned: Server, request_: GenerationRequest, tmp_path: Path
) -> None:
    """Its prompts and answers are as long, but its steps take another time. Its result is kept next to the first."""
    facts = tuned.engine.tuning_facts()
    assert facts is not None
    kept_in = Path(shutil.copy(facts.kept_in, tmp_path))
    other = Server(ServedEngine(kept_in))
    other.open("other", rows_left=1_000_000)
    other.inputs.note_sent("other", [request_])
    other.run(1000)
    assert len({*other.engine.tried}) > 5, "it makes a sweep of its own"
    kinds = [entry["kind"] for entry in yaml.safe_load(kept_in.read_text(encoding="utf-8"))]
    assert [(kind["is_constrained"], kind["has_images"]) for kind in kinds] == [
        (False, False),
        (bool(request_.sampling.choice), bool(request_.images)),
    ]


def test_what_a_job_s_rows_are_says_nothing_of_the_next_job_s(tuned: Server) -> None:
    facts = tuned.engine.tuning_facts()
    assert facts is not None
    server = Server(ServedEngine(Path(facts.kept_in)))
    server.open("first", rows_left=10)
    server.inputs.note_sent(
        "first", [GenerationRequest(request_id="0", prompt="x", sampling=Sampling(regex="a"))]
    )
    server.run(2.5)
    server.open("second", rows_left=1_000_000)
    server.run(300)
    (entry,) = yaml.safe_load(Path(facts.kept_in).read_text(encoding="utf-8"))
    assert {*server.engine.tried} == {DEFAULT, StepLimits(**entry["limits"])}, (
        "those of an unconstrained table"
    )


def test_an_engine_that_is_kept_for_another_job_begins_anew(tuned: Server) -> None:
    facts = tuned.engine.tuning_facts()
    assert facts is not None
    server = Server(ServedEngine(Path(facts.kept_in)))
    server.open("first", rows_left=1_000_000)
    server.run(400)
    assert server.engine.synthetic.limits != DEFAULT
    server.open("short", rows_left=10)
    server.run(2.5)
    assert (server.engine.synthetic.limits, server.tuning.note) == (DEFAULT, "")


def test_where_nothing_is_to_be_won_the_default_stays_and_that_is_said(tmp_path: Path) -> None:
    server = Server(ServedEngine(tmp_path / "model.yaml", is_compute_bound=True))
    server.open("long", rows_left=1_000_000)
    server.run(1000)
    assert server.engine.synthetic.limits == DEFAULT
    assert server.tuning.note.startswith("Tuned: steps of 2,048, 64 rows, vLLM's default: ")


@pytest.mark.parametrize(
    ("rows_left", "config", "options"),
    [
        pytest.param(1000, {}, {}, id="a short table"),
        pytest.param(None, {}, {}, id="rows that nobody has counted, as of a UDF"),
        pytest.param(1_000_000, {"tune": False}, {}, id="switched off"),
        pytest.param(1_000_000, {}, {"has_fixed_limits": True}, id="PipeMax, whose limits are fixed"),
    ],
)
def test_what_is_not_tuned_keeps_its_limits_and_says_nothing(
    tmp_path: Path, rows_left: int | None, config: dict[str, Any], options: dict[str, Any]
) -> None:
    server = Server(ServedEngine(tmp_path / "model.yaml", **options), EngineConfig(model="model", **config))
    server.open("job", rows_left=rows_left)
    server.run(200)
    assert (server.engine.tried, server.tuning.note) == ([], "")
    assert not [*tmp_path.iterdir()]


def test_a_fault_of_the_tuning_ends_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(ServedEngine(tmp_path / "model.yaml"))
    server.open("job", rows_left=1_000_000)
    server.run(20)
    monkeypatch.setattr(server.engine, "take_step_records", lambda: 1 / 0)
    server.run(20)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "the tuning has ended by a fault of its own"
    ]
    assert server.engine.limits() == [DEFAULT]
