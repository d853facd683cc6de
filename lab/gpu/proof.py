"""Run everything that one GPU can show, within a limit of seconds: what ``tools/gpu_proof.sh`` starts.

A part that would not fit into what is left of the clock is left out by name. A part that takes longer is ended, and its
tables so far stay. Each part's tables are in DIR/summary.md as soon as it ends.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from lab.gpu.machine import Machine, this_machine, versions
from lab.gpu.part_process import PartProcess
from lab.gpu.parts import GROUPS, Part, Places, chosen_parts
from lab.gpu.side_by_side import ended_by_sigterm
from lab.gpu.summary import PartEnd, last_line, overview, section, tables

PASSED, FAILED, NOTHING_RAN = 0, 1, 3


class RunPart(Protocol):
    """Runs a part; fakes of it take no time."""

    def __call__(self, part: Part, limit_s: float) -> int | None:
        """Return the exit status, or None if the part was ended at its limit."""
        ...

    def output(self, part: Part) -> str:
        """Return what the part has printed so far."""
        ...


def prove(
    parts: Sequence[Part],
    run: RunPart,
    *,
    machine: Machine,
    seconds: float,
    now_s: Callable[[], float],
    tell: Callable[[str], None],
) -> list[PartEnd]:
    """Run the parts in order within ``seconds`` of the clock. ``tell`` gets each part's section as it ends."""
    deadline_s, ends = now_s() + seconds, []
    for part in parts:
        begin_s = now_s()
        left_s = deadline_s - begin_s
        if reason := machine.lack(gigabytes=part.gigabytes, modules=part.modules):
            end = PartEnd(name=part.name, result="skipped", note=reason)
        elif part.expected_s > left_s:
            note = f"takes about {part.expected_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
            end = PartEnd(name=part.name, result="left out", note=note)
        else:
            status = run(part, left_s)
            result = "ended" if status is None else "failed" if status else "passed"
            note = last_line(run.output(part), part.says)
            end = PartEnd(name=part.name, result=result, seconds=now_s() - begin_s, note=note)
        ends.append(end)
        tell(section(end, "" if end.seconds is None else tables(run.output(part))))
    return ends


def exit_status(ends: Sequence[PartEnd]) -> int:
    """Return 0 if every part that ran passed, 1 if one failed or was ended, 3 if none ran."""
    if any(end.has_failed for end in ends):
        return FAILED
    return PASSED if any(end.result == "passed" for end in ends) else NOTHING_RAN


def _header(machine: Machine) -> str:
    git = ["git", "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        commit = ""
    gpu = machine.no_gpu_because if machine.gpu is None else f"{machine.gpu}, {machine.gigabytes:.0f} GB"
    found = [("date", datetime.now(UTC).isoformat(timespec="seconds")), ("commit", commit or "unknown")]
    rows = [f"| {name} | {value} |" for name, value in [*found, ("GPU", gpu), *versions()]]
    return "\n".join(["| | |", "|---|---|", *rows, ""])


def main(arguments: Sequence[str]) -> int:
    begin_s = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="tools/gpu_proof.sh",
        description="Groups: " + "; ".join(f"{name} = {', '.join(parts)}" for name, parts in GROUPS.items()),
    )
    parser.add_argument("parts", nargs="+", metavar="GROUP_OR_PART")
    parser.add_argument("--seconds", type=float, default=420.0, help="of all parts together (default 420)")
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"), help="directory (default gpu-proof)")
    options = parser.parse_args(arguments)
    try:
        parts = chosen_parts(options.parts)
    except ValueError as error:
        parser.error(str(error))
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    machine = this_machine(sorted({module for part in parts for module in part.modules}))
    (out / "summary.md").write_text(_header(machine), encoding="utf-8")

    def tell(text: str) -> None:
        with (out / "summary.md").open("a", encoding="utf-8") as summary:
            summary.write(text)

    with (
        ended_by_sigterm(),
        tempfile.TemporaryDirectory(prefix="pipemax-gpu-proof-", ignore_cleanup_errors=True) as scratch,
    ):
        run = PartProcess(Places(out=out, scratch=Path(scratch)))
        left_s = options.seconds - (time.monotonic() - begin_s)
        ends = prove(parts, run, machine=machine, seconds=left_s, now_s=time.monotonic, tell=tell)
    tell(overview(ends))
    print("\n" + (out / "summary.md").read_text(encoding="utf-8"))
    print(f"Outputs, and this summary, are in {out}/")
    return exit_status(ends)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
