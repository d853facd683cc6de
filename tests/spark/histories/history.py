"""A random history of one input and two outputs: other writers' steps, jobs, deaths and pauses, checked by the model.

After each step that runs a job to its end the output holds what the model says; after a death, a pause or a refusal it
holds, of each row, what was there before or what the job was to make of it.
"""

import itertools
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

from pipemax_spark.errors import JobError, JobFailedError, NewSpec
from pipemax_spark.options import JobOptions
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.storage.output_table import open_table
from pipemax_spark.storage.spec_properties import SPEC_PROPERTY
from tests.spark.conftest import Jobs
from tests.spark.histories.driver import Driver
from tests.spark.histories.model import Held, Request, Row, after, is_between
from tests.spark.histories.tables import Input, Output, Version
from tests.spark.test_recorded_table import RECORDED

SPECS = ("Say", "Tell")
WORDS = ("alpha", "beta", "gamma", None, "[[error]]")
WHERE = {"id % 2 = 0": lambda row: dict(row)["id"] % 2 == 0}
_OPERATIONS_OF_A_RUN = 40
"""About as many as a run has, from its work directory to its end."""
_CHANGED = "were updated or deleted since the last run"
_RESCAN = "--rescan once"
_TWICE = "ids are not unique"
_TAKEN_OVER = "was taken over by run|another run"
_NO_IDENTITY = "which the output lacks, so its rows cannot be matched by content; give --id-columns"
_NOTHING_TO_REUSE = "--reuse .* has no "
_RUNNING = "another job, run"
_TWO_KINDS = "may be one of these or an error row; give --retry-errors once they"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a job is told."""

    output: Output
    spec: str
    work_dir: str | None
    where: str | None = None
    incremental: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def has(self, option: str) -> bool:
        return option in dict(self.options)

    def __str__(self) -> str:
        flags = [name if value is True else f"{name}={str(value)[-8:]}" for name, value in self.options]
        kind = ["incremental"] if self.incremental else []
        where = [f"where={self.where!r}"] if self.where else []
        place = Path(self.work_dir or "beside").name
        return (
            f"{Path(self.output.name).name} {self.spec} in {place} {' '.join(kind + where + flags)}".strip()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run may end: complete with ``held`` or, where ``refused`` is given, with this error and nothing done."""

    held: Held
    refused: str | None = None


class History:
    """Steps of one seed. ``log`` has them in words."""

    def __init__(self, jobs: Jobs, outputs: list[Output], seed: int, *, begins_recorded: bool) -> None:
        self.rng = Random(seed)
        self.log: list[str] = []
        self.runs = 0
        self.has_ids = self.rng.random() < 0.7
        self._jobs = jobs
        self._input = Input(jobs.spark, str(jobs.directory / "in"))
        self._outputs = outputs
        self._ids = itertools.count()
        self._numbers = itertools.count()
        self._specs: dict[str, str] = {}
        self._positions: dict[tuple[str, str, str | None], set[int | None]] = {}
        self._drivers: list[Driver] = []
        self._paused: tuple[Driver, Run, Version] | None = None
        if begins_recorded and self.rng.random() < 0.1:
            self._begin_recorded()
        else:
            self._append()

    def _begin_recorded(self) -> None:
        """Begin with the table of ``test_recorded_table``, which an earlier version left in the midst of a run.

        No wheel of a release exists yet with which a history could begin.
        """
        directory, output = self._jobs.directory, self._outputs[0]
        with zipfile.ZipFile(RECORDED) as archive:
            archive.extractall(directory)
        for manifest in Path(output.name, "_pipemax").glob("*/*/manifest.json"):
            manifest.write_text(manifest.read_text().replace("{directory}", str(directory)))
        self._input.begin()
        self.has_ids = True
        self._ids = itertools.count(1 + max(dict(row)["id"] for row in self._input.now.rows))
        output.held = self._actual(output)
        request = Request(spec=SPECS[0], columns=self._input.now.columns, has_ids=True)
        assert is_between(request, output.held, Counter(), after(request, Counter(), self._input.now.rows))
        self.log.append("a table that an earlier version left in the midst of a run")

    # Steps.

    def step(self) -> None:
        """Take one step; a step that does not apply now is another one."""
        steps: dict[Callable[[], str | None], int] = {
            self._run: 8,
            self._append: 4,
            self._change_input: 4,
            self._tend_input: 2,
            self._change_schema: 1,
            self._restore_input: 1,
            self._change_output: 3,
        }
        if self._paused is not None:
            steps[self._resume] = 6
        while (said := self.rng.choices([*steps], [*steps.values()])[0]()) is None:
            pass
        self.log.append(said)

    def end(self) -> None:
        """Let a paused job end, and have a job do what is left of each spec that an output holds."""
        if self._paused is not None:
            self.log.append(self._resume())
        for output in self._outputs:
            specs = {entry.spec for entry in output.held} or {SPECS[0]}
            for spec in sorted(specs):
                run = Run(output=output, spec=spec, work_dir=None)
                self.log.append(self._started(run, stops_at=None))

    def close(self) -> None:
        for driver in reversed(self._drivers):
            driver.close()

    # Other writers.

    def _append(self) -> str:
        columns = ("id", "text")
        if self._input.versions:
            columns = self._input.now.columns
        if self.rng.random() < 0.15 and len(columns) < 5:
            columns = (*columns, f"note_{len(columns)}_{next(self._numbers)}")
        count = self.rng.choice([1, 3, 8, 20])
        rows = [{"id": next(self._ids), **self._values(columns)} for _ in range(count)]
        if not self.has_ids:
            rows += [dict(row) for row in rows if self.rng.random() < 0.4]
            if self._input.versions and self._input.now.rows:
                rows.append(dict(self.rng.choice(self._input.now.rows)))
        self._input.append(rows, columns)
        return f"append {len(rows)} rows of {len(columns)} columns"

    def _values(self, columns: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {name: self.rng.choice(["x", "y", None]) for name in columns if name != "id"}
        return values | {"text": self.rng.choice(WORDS)}

    def _change_input(self) -> str | None:
        ids = sorted({dict(row)["id"] for row in self._input.now.rows})
        if not ids:
            return None
        some = self.rng.sample(ids, min(len(ids), self.rng.choice([1, 2, 5])))
        condition = f"id IN ({', '.join(map(str, some))})"
        match self.rng.choice(["update", "mend", "delete", "merge"]):
            case "update":
                self._input.update(condition, f"changed {next(self._numbers)}")
                return f"UPDATE of {len(some)} ids"
            case "mend":
                bad = [row for row in self._input.now.rows if dict(row).get("text") in (None, "[[error]]")]
                if not bad:
                    return None
                self._input.update("text IS NULL OR text = '[[error]]'", "mended")
                return f"UPDATE mends {len(bad)} rows"
            case "delete":
                self._input.delete(condition)
                return f"DELETE of {len(some)} ids"
            case _:
                if not self.has_ids:  # a merge needs one row of an id
                    return None
                kept = some[: self.rng.choice([0, 2])]
                new = [next(self._ids) for _ in range(self.rng.choice([1, 3]))]
                self._input.merge([{"id": i, "text": self.rng.choice(WORDS)} for i in (*kept, *new)])
                return f"MERGE updates {len(kept)} and inserts {len(new)}"

    def _tend_input(self) -> str:
        if self.rng.random() < 0.6:
            self._input.optimize()
            return "OPTIMIZE input"
        self._input.vacuum()
        return "VACUUM input"

    def _change_schema(self) -> str | None:
        others = [name for name in self._input.now.columns if name not in ("id", "text")]
        if self.rng.random() < 0.3:
            self._input.keep_deletions_in_vectors()
            return "input: deletion vectors"
        if not self._input.is_mapped:
            self._input.map_columns()
            return "input: column mapping"
        if not others:
            return None
        name = self.rng.choice(others)
        if self.rng.random() < 0.5:
            self._input.rename(name, f"renamed_{next(self._numbers)}")
            return f"RENAME {name}"
        self._input.drop(name)
        return f"DROP {name}"

    def _restore_input(self) -> str | None:
        earlier = [v for v in self._input.restorable if Counter(v.rows) != Counter(self._input.now.rows)]
        if not earlier:
            return None
        version = self.rng.choice(earlier)
        self._input.restore(version)
        return f"RESTORE input to version {version.number}"

    def _change_output(self) -> str | None:
        output = self.rng.choice(self._outputs)
        if not output.exists:
            return None
        name = Path(output.name).name
        is_free = self._paused is None
        match self.rng.choice(
            ["optimize", "vacuum", "append", "alter", "column", "vectors", "restore", "delete"]
        ):
            case "optimize":
                output.optimize()
            case "vacuum":
                output.vacuum()
            case "append":
                output.append_elsewhere()
            case "alter":
                output.alter(next(self._numbers))
            case "column":
                output.add_column(next(self._numbers))
            case "vectors":
                output.keep_deletions_in_vectors()
            case "restore" if is_free and output.restorable:
                version, held = self.rng.choice(output.restorable)
                output.restore(version, held)
                self._may_rescan(output)
                self._check(output, output.held, "a restored output")
                return f"RESTORE {name} to version {version}"
            case "delete" if is_free and output.held:
                output.delete(self.rng.choice(sorted(output.held, key=str)))
                return f"DELETE of an id from {name}"
            case _:
                return None
        return f"{name}: OPTIMIZE, VACUUM, a row, a property or a column"

    # Jobs.

    def _run(self) -> str:
        rng, output = self.rng, self.rng.choices(self._outputs, [3, 1])[0]
        work_dir = rng.choice([None, str(self._jobs.directory / "work")])
        spec = rng.choices(SPECS, [4, 1])[0]
        where = rng.choice([*WHERE]) if rng.random() < 0.2 else None
        run = Run(output=output, spec=spec, work_dir=work_dir, where=where)
        if rng.random() < 0.45:
            flags = rng.choice([(), (), ("skip_changes",), ("rescan",)])
            run = replace(run, incremental=True, options=tuple((flag, True) for flag in flags))
        else:
            chosen: dict[str, tuple[float, Any]] = {
                "retry_errors": (0.25, True),
                "redo_changed": (0.25 if self.has_ids else 0, True),
                "limit": (0.2, rng.choice([1, 4])),
                "compact": (0.1, True),
                "compute_each": (0.1, True),
                "select": (0.15 if self.has_ids else 0, ("id", "text")),
                "new_spec": (0.3, NewSpec.REPLACE),
            }
            others = [other for other in self._outputs if other is not output and other.exists]
            if others and rng.random() < 0.2:
                chosen = {**chosen, "reuse": (1, others[0].name), "compute_each": (0, True)}
            options = [(name, value) for name, (share, value) in chosen.items() if rng.random() < share]
            run = replace(run, options=tuple(options))
        stops_at = rng.randint(1, _OPERATIONS_OF_A_RUN) if rng.random() < 0.45 else None
        return self._started(run, stops_at=stops_at)

    def _started(self, run: Run, *, stops_at: int | None) -> str:
        self.runs += 1
        if run.has("new_spec"):
            self._may_rescan(run.output)
        driver = Driver(self._jobs.spark, self._options(run), stops_at=stops_at)
        self._drivers.append(driver)
        is_done = driver.wait()
        if not is_done and self._paused is None and not run.incremental and self.rng.random() < 0.4:
            self._paused = (driver, run, self._input.now)
            return f"run {run}: pauses {driver.stopped}; {self._judge_part(run)}"
        if not is_done:
            driver.die()
            return f"run {run}: dies {driver.stopped}; {self._judge_part(run)}"
        return f"run {run}: {self._judge(driver, run)}"

    def _resume(self) -> str:
        """Let the paused job go on: it may have read the input as it was then or as it is now."""
        assert self._paused is not None
        driver, run, version = self._paused
        self._paused = None
        driver.resume()
        assert driver.wait()
        ends = [self._complete(run, one) for one in (version, self._input.now)]
        actual = self._actual(run.output)
        if driver.error is None and not run.has("limit"):
            self._assert(actual in ends, run, f"resumed, it has left {self._difference(ends[0], actual)}")
        between = [is_between(self._request(run), actual, run.output.held, end) for end in ends]
        self._assert(any(between), run, f"resumed, it has left {self._difference(ends[0], actual)}")
        if driver.error is not None:
            deleted = any(v.deletes_files for v in self._input.versions if v.number > version.number)
            allowed = f"{_TAKEN_OVER}|has changed since{'|files' if deleted else ''}"
            self._assert(
                self._is_refusal(driver.error, allowed), run, f"resumed, it ends by {driver.error!r}"
            )
        run.output.held = actual
        run.output.note()
        return f"the paused run {run.output.name[-3:]} {run.spec} goes on: {self._end_of(driver)}"

    def _options(self, run: Run) -> JobOptions:
        return replace(
            self._jobs.defaults,
            input=self._input.path,
            output=run.output.name,
            source=PromptSource(template=f"{run.spec} {{text}}"),
            id_columns=("id",) if self.has_ids else (),
            max_error_rate=1.0,
            work_dir=run.work_dir,
            where=run.where,
            incremental=run.incremental,
            commit_every=timedelta(seconds=1),
            **{"new_spec": NewSpec.STACK, **dict(run.options)},
        )

    def _request(self, run: Run) -> Request:
        columns = dict(run.options).get("select") or self._input.now.columns
        return Request(
            spec=run.spec,
            columns=columns,
            has_ids=self.has_ids,
            where=WHERE[run.where] if run.where else lambda _: True,
            retries_errors=run.has("retry_errors"),
            redoes_changed=run.has("redo_changed"),
            replaces_specs=run.has("new_spec"),
        )

    # What may come of a job.

    def _complete(
        self, run: Run, version: Version, appended: list[Row] | None = None, *, held: Held | None = None
    ) -> Held:
        request = self._request(run)
        if not run.has("select"):
            request = replace(request, columns=version.columns)
        return after(request, run.output.held if held is None else held, version.rows, appended)

    def _endings(self, run: Run) -> list[Ending]:
        held = run.output.held
        if not run.incremental:
            refusals = self._refusals(run)
            if refusals:
                return [Ending(held=held, refused=refusal) for refusal in refusals]
            return [Ending(held=self._complete(run, self._input.now))]
        endings = []
        for position in self._positions.get(self._position_key(run), {None}):
            if position is None or run.has("rescan"):
                endings.append(Ending(held=self._complete(run, self._input.now)))
                continue
            endings += self._endings_since(run, position)
        return endings

    def _refusals(self, run: Run) -> list[str]:
        """Return why a run over the whole input is refused, if it is."""
        refusals, output = [], run.output
        if not self.has_ids and output.exists and set(self._input.now.columns) - output.columns():
            refusals.append(_NO_IDENTITY)
        others = [other for other in self._outputs if other.name == dict(run.options).get("reuse")]
        if any(all(entry.spec != run.spec for entry in other.held) for other in others):
            refusals.append(_NOTHING_TO_REUSE)
        replaces = run.has("new_spec") and any(entry.spec != run.spec for entry in output.held)
        if replaces and run.has("retry_errors") and not self.has_ids:
            refusals.append(_TWO_KINDS)
        return refusals

    def _endings_since(self, run: Run, position: int) -> list[Ending]:
        """Of an incremental run that goes on from a version of the input."""
        news = [version for version in self._input.versions if version.number > position]
        skips, held = run.has("skip_changes"), run.output.held
        appended = [row for v in news if not (skips and v.changes) for row in v.appended]
        complete = self._complete(run, self._input.now, appended)
        endings = []
        if skips and any(v.changes is not False and v.inserts for v in news):
            complete = self._complete(run, self._input.now, held=complete)
        changes = {v.changes for v in news} if not skips else {False}
        if True in changes or None in changes:
            endings.append(Ending(held=held, refused=_CHANGED))
        if True not in changes:
            endings.append(Ending(held=complete))
        deletes = any(v.deletes_files for v in news) and any(v.moves_files for v in news)
        if deletes or any(v.changes_schema for v in news):
            endings.append(Ending(held=held, refused=_RESCAN))
        if self.has_ids and len({dict(row)["id"] for row in appended}) < len(appended):
            endings.append(Ending(held=held, refused=_TWICE))
        return endings

    def _position_key(self, run: Run) -> tuple[str, str, str | None]:
        return run.output.name, run.spec, run.where

    def _may_rescan(self, output: Output) -> None:
        """Note that the next night may compare all rows: a replaced spec that is used again has no position."""
        for key, positions in self._positions.items():
            if key[0] == output.name:
                positions.add(None)

    def _advance(self, run: Run, *, is_certain: bool) -> None:
        if run.incremental:
            known = set() if is_certain else self._positions.get(self._position_key(run), {None})
            self._positions[self._position_key(run)] = {*known, self._input.now.number}

    # Judgement.

    def _judge(self, driver: Driver, run: Run) -> str:
        """Compare what a job that has ended has left with what it may leave."""
        endings, actual = self._endings(run), self._actual(run.output)
        before, error = run.output.held, driver.error
        if error is not None:
            refusals = [e.refused for e in endings if e.refused is not None]
            if self._paused is not None and self._paused[1].output is run.output:
                refusals.append(_RUNNING)  # if both have the same work directory
            is_known = self._is_refusal(error, "|".join(refusals)) if refusals else False
            self._assert(is_known, run, f"ends by {error!r}; known are {refusals}")
            self._assert(
                actual == before, run, f"was refused and has left {self._difference(before, actual)}"
            )
            return f"refused: {str(error)[:100]}"
        ends = [e.held for e in endings if e.refused is None]
        if run.has("limit"):
            limit = dict(run.options)["limit"]
            due = sum((ends[0] - before).values())
            self._assert(
                sum((actual - before).values()) == min(limit, due)
                and is_between(self._request(run), actual, before, ends[0]),
                run,
                f"has left {self._difference(ends[0], actual)}",
            )
        else:
            said = self._difference(ends[0], actual) if ends else f"not refused: {endings}"
            self._assert(actual in ends, run, f"has left {said}")
        self._advance(run, is_certain=True)
        run.output.held = actual
        run.output.note()
        return f"{sum((actual - before).values())} rows"

    def _judge_part(self, run: Run) -> str:
        """Compare what a job that stands still has left: a part of what it is to do, in whole rows."""
        actual, before = self._actual(run.output), run.output.held
        ends = [ending.held for ending in self._endings(run)]
        between = [is_between(self._request(run), actual, before, end) for end in ends]
        self._assert(any(between), run, f"stands still and has left {self._difference(ends[0], actual)}")
        self._advance(run, is_certain=False)
        run.output.held = actual
        run.output.note()
        return f"{sum((actual - before).values())} rows"

    def _check(self, output: Output, expected: Held, what: str) -> None:
        actual = self._actual(output)
        assert actual == expected, f"{what}: {self._difference(expected, actual)}"

    def _actual(self, output: Output) -> Held:
        def spec_of(spec_hash: str) -> str:
            if spec_hash not in self._specs:
                properties = open_table(output.spark, output.name).properties()
                text = json.loads(properties[f"{SPEC_PROPERTY}{spec_hash}"])["spec"]
                self._specs[spec_hash] = next(spec for spec in SPECS if f'"{spec} ' in text)
            return self._specs[spec_hash]

        return output.actual(spec_of)

    @staticmethod
    def _is_refusal(error: BaseException, pattern: str) -> bool:
        return isinstance(error, JobError | JobFailedError) and re.search(pattern, str(error)) is not None

    @staticmethod
    def _end_of(driver: Driver) -> str:
        return "complete" if driver.error is None else f"refused: {str(driver.error)[:100]}"

    @staticmethod
    def _difference(expected: Held, actual: Held) -> str:
        return f"{[*(expected - actual).items()][:4]} missing, {[*(actual - expected).items()][:4]} in excess"

    def _assert(self, is_right: bool, run: Run, what: str) -> None:
        assert is_right, f"run {run} {what}"


def play(jobs: Jobs, outputs: list[Output], seed: int, *, steps: int) -> History:
    """Play a history to its end. Raise ``AssertionError`` with its steps where a table is not as the model says."""
    # The recorded table is at the path of the first output, and Delta's.
    history = History(jobs, outputs, seed, begins_recorded=type(outputs[0]) is Output)
    try:
        for _ in range(steps):
            history.step()
        history.end()
    except Exception as error:
        lines = "\n".join(f"  {number}. {said}" for number, said in enumerate(history.log, 1))
        raise AssertionError(
            f"seed {seed}, {'ids' if history.has_ids else 'no ids'}:\n{lines}\n{error}"
        ) from error
    finally:
        history.close()
    return history
