"""Run generated programs, each in a fresh isolated interpreter with limits, and judge the outcome.

Every program gets `python -I`, an empty environment, a temporary folder and a session of its own,
limits on memory, CPU, file size, processes and wall time and, where the system allows, no network,
a process namespace that ends with it, no other user's rights and no writing outside its folder
(`Isolation.missing` says what this system lacks). Success must be told on a private descriptor by
repeating a random sentinel after the last assert, so no exit status and no output can forge it. A
program written against this very runner could search its own interpreter for the sentinel: a pass
is a score, not a security boundary.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dlm_decode.errors import CapabilityError

CHILD = Path(__file__).with_name("sandbox_child.py")
MAX_REPORT_BYTES = 4096
MOST_PATIENCE = 6
PRESSURE = Path("/proc/pressure/cpu")
FIRST_USER = 1 << 30
"""Programs run under ids from here on, one each, so that process counts are their own."""

PARTS = {
    "user": "a user namespace",
    "pid": "a process namespace (a program's stray children could outlive it)",
    "net": "a network namespace (programs can use the network)",
    "ipc": "a namespace for shared memory",
    "identity": "a user without rights (root's process count is not limited)",
    "landlock": "Landlock (programs can write wherever this user can)",
}


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 2 << 30
    file_bytes: int = 1 << 20
    processes: int = 32
    open_files: int = 64

    def as_rlimits(self) -> dict[str, int]:
        return {
            "AS": self.memory_bytes,
            "CPU": math.ceil(self.cpu_s),
            "FSIZE": self.file_bytes,
            "NPROC": self.processes,
            "NOFILE": self.open_files,
            "CORE": 0,
        }


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    `status` is "passed", "wrong" (an assert failed), "exception", "syntax", "memory", "exit" (it
    ended itself before its last line), "died" (killed by a signal or a limit), "forged" (the
    private descriptor was closed or written to), "timeout" or "isolation" (it was not run).
    """

    status: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass(frozen=True)
class Isolation:
    """The parts of `PARTS` that programs are run with, and those that this system lacks."""

    parts: tuple[str, ...]
    missing: tuple[str, ...]

    def describe(self) -> str:
        """One line for people: what is missing, if anything."""
        if not self.missing:
            return "generated code runs isolated, without network"
        return "generated code runs without " + "; ".join(PARTS[part] for part in self.missing)


@cache
def isolation() -> Isolation:
    """What this system offers, found out once by running a trivial program with each part."""
    if os.name != "posix":
        raise CapabilityError("running generated code needs a POSIX system (Linux or macOS)")
    wanted = _wanted_parts()
    found: list[str] = []
    for part in wanted:
        tried = Isolation((*found, part), ())
        if run_program("import re", isolation_=tried).passed:
            found.append(part)
    return Isolation(tuple(found), tuple(part for part in wanted if part not in found))


def _wanted_parts() -> list[str]:
    """Root needs no user namespace but another identity; others the reverse."""
    is_root = os.geteuid() == 0
    return [part for part in PARTS if part != ("user" if is_root else "identity")]


def run_program(
    program: str, limits: Limits | None = None, *, isolation_: Isolation | None = None
) -> Outcome:
    """Run one program to its last line, or until a limit ends it."""
    limits = limits or Limits()
    used = isolation() if isolation_ is None else isolation_
    folder = tempfile.mkdtemp(prefix=f"dlm-decode-{os.getpid()}-")
    reader, writer = os.pipe()
    try:
        job = _Job(program, limits, used, secrets.token_hex(16), writer)
        return _judged(job, folder, reader)
    finally:
        os.close(reader)
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Job:
    program: str
    limits: Limits
    isolation: Isolation
    sentinel: str
    descriptor: int

    def encode(self, user: int) -> bytes:
        content = {
            "program": self.program,
            "limits": self.limits.as_rlimits(),
            "isolation": self.isolation.parts,
            "sentinel": self.sentinel,
            "descriptor": self.descriptor,
            "user": user,
        }
        return json.dumps(content).encode()


def _judged(job: _Job, folder: str, reader: int) -> Outcome:
    deadline = _Deadline(job.limits.wall_s)
    process = _started(job, folder)
    try:
        user = FIRST_USER + process.pid
        if "identity" in job.isolation.parts:
            os.chown(folder, user, user)
        _send(process, job.encode(user))
        report, is_late = _read_report(reader, deadline)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if is_late:
        return Outcome("timeout", f"stopped after {job.limits.wall_s:g} s")
    return _outcome(report, job.sentinel)


def _started(job: _Job, folder: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            pass_fds=(job.descriptor,),
            start_new_session=True,
        )
    finally:
        os.close(job.descriptor)


def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stream:
        stream.write(content)


class _Deadline:
    """Wall time less the time in which this machine had no CPU to give, so that what passes does
    not depend on other load; never more than `MOST_PATIENCE` times the limit.
    """

    def __init__(self, wall_s: float) -> None:
        self.wall_s = wall_s
        self.started_s = time.monotonic()
        self.stalled_s = _stalled_s()

    def remaining_s(self) -> float:
        elapsed = time.monotonic() - self.started_s
        patience = min(_stalled_s() - self.stalled_s, (MOST_PATIENCE - 1) * self.wall_s)
        return self.wall_s + patience - elapsed


def _stalled_s() -> float:
    """Seconds in which some process of this machine waited for a CPU; 0 where it does not tell."""
    try:
        some = PRESSURE.read_text().split("\n", 1)[0]
        return int(some.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return 0.0


def _read_report(reader: int, deadline: _Deadline) -> tuple[bytes, bool]:
    """One line, or less if the descriptor was closed; True if time ran out first."""
    report = b""
    while not report.endswith(b"\n") and len(report) < MAX_REPORT_BYTES:
        remaining = deadline.remaining_s()
        ready, _, _ = select.select([reader], [], [], max(remaining, 0))
        if not ready and remaining > 0:
            continue
        if not ready:
            return report, True
        piece = os.read(reader, MAX_REPORT_BYTES)
        if not piece:
            break
        report += piece
    return report, False


def _outcome(report: bytes, sentinel: str) -> Outcome:
    """A pass is one whole line with the sentinel and nothing else; anything odd is not one."""
    if not report:
        return Outcome("died", "ended without a word: a signal, a limit, or an exit of its own")
    try:
        status, detail = json.loads(report)
    except (ValueError, TypeError):
        return Outcome("forged", "something else was written to the private descriptor")
    if status == "passed" and detail != sentinel:
        return Outcome("forged", "success was claimed without the sentinel")
    return Outcome(str(status), "" if status == "passed" else str(detail))


def run_programs(
    programs: Iterable[str], limits: Limits | None = None, *, workers: int | None = None
) -> list[Outcome]:
    """Outcomes of many programs in order, `workers` at a time (default: the number of CPUs)."""
    isolation()
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        return list(pool.map(lambda program: run_program(program, limits), programs))
