"""Run one untrusted program in this fresh interpreter; `sandbox.py` starts it, never import it.

Standard input holds the job as JSON. The outcome is one JSON line on the descriptor that the job
names; "passed" carries the job's sentinel, which is written only after the program's last line. The
program runs as a module called `program`, so a body under `if __name__ == "__main__"` does not run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import types
from typing import Any

NAMESPACES = {"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x08000000}
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 1, 8, 38
CAPABILITY_VERSION = 0x20080522
CAP_DAC_READ_SEARCH = 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_FILE = 1 << 1
WRITE_RIGHTS = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Landlock ABI 1: write to a file, remove and make entries of every kind."""
REFER, TRUNCATE = 1 << 13, 1 << 14
TCP_RIGHTS = 0b11
SCOPES = 0b11


class IsolationError(RuntimeError):
    """A part of the isolation that the job asks for cannot be had here."""


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        _isolate(job)
    except (OSError, IsolationError, ValueError) as error:
        _report(job["descriptor"], "isolation", repr(error))
        os._exit(1)
    status, detail = _execute(job["program"])
    _report(job["descriptor"], status, job["sentinel"] if status == "passed" else detail)
    os._exit(0)


def _isolate(job: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    parts = set(job["isolation"])
    flags = sum(flag for name, flag in NAMESPACES.items() if name in parts)
    if flags:
        _checked(libc.unshare(flags), "unshare")
    if "pid" in parts:
        _wait_in_parent(libc, job["descriptor"])  # the child is the namespace's init
        _wait_in_parent(libc, job["descriptor"])  # when init ends, all of the namespace ends
    _set_limits(job["limits"])
    if "identity" in parts:
        _drop_root(libc, job["user"])
    if "landlock" in parts:
        _forbid_writing(libc, os.getcwd())


def _wait_in_parent(libc: ctypes.CDLL, descriptor: int) -> None:
    child = os.fork()
    if child:
        os.close(descriptor)
        os.waitpid(child, 0)
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            resource.setrlimit(number, (value, value))


def _drop_root(libc: ctypes.CDLL, user: int) -> None:
    """Become a user that owns nothing; of root's powers only reading files is kept."""
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITY_VERSION, 0))
    kept = 1 << CAP_DAC_READ_SEARCH
    data = ctypes.create_string_buffer(struct.pack("6I", kept, kept, 0, 0, 0, 0))
    _checked(libc.capset(header, data), "capset")


def _forbid_writing(libc: ctypes.CDLL, folder: str) -> None:
    """Landlock: no writing below anything but `folder`, no TCP, no signals to other processes."""
    version = _checked(libc.syscall(LANDLOCK_CREATE, None, 0, 1), "landlock")
    files = WRITE_RIGHTS | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    rules = [files, TCP_RIGHTS if version >= 4 else 0, SCOPES if version >= 6 else 0]
    size = 8 if version < 4 else 16 if version < 6 else 24
    described = ctypes.create_string_buffer(struct.pack("3Q", *rules), 24)
    ruleset = _checked(libc.syscall(LANDLOCK_CREATE, described, size, 0), "landlock")
    for path, rights in ((folder, files), (os.devnull, WRITE_FILE)):
        parent = os.open(path, os.O_PATH)
        beneath = ctypes.create_string_buffer(struct.pack("<Qi", rights, parent), 12)
        _checked(libc.syscall(LANDLOCK_ADD, ruleset, 1, beneath, 0), "landlock rule")
        os.close(parent)
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise IsolationError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _execute(program: str) -> tuple[str, str]:
    """What became of the program, in one word, and what to tell of it."""
    try:
        code = compile(program, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return "syntax", _told(error)
    module = sys.modules["program"] = types.ModuleType("program")
    try:
        exec(code, module.__dict__)
    except AssertionError as error:
        return "wrong", _told(error)
    except MemoryError:
        return "memory", "MemoryError"
    except SystemExit as error:
        return "exit", _told(error)
    except BaseException as error:
        return "exception", _told(error)
    return "passed", ""


def _told(error: BaseException) -> str:
    name = type(error).__name__
    with contextlib.suppress(BaseException):  # a program's own exception may fail to print
        return f"{name}: {error}"[:200]
    return name


def _report(descriptor: int, status: str, detail: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, json.dumps([status, detail]).encode() + b"\n")


if __name__ == "__main__":
    main()
