"""Generated programs run isolated: hostile ones neither escape, nor forge a pass, nor hang."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from dlm_decode.eval.sandbox import PARTS, Isolation, Limits, isolation, run_program, run_programs

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")

QUICK = Limits(wall_s=4.0, cpu_s=2, memory_bytes=512 << 20)

ENDS = {
    "passes": ("assert 1 + 1 == 2", "passed"),
    "fails an assert": ("assert 1 + 1 == 3", "wrong"),
    "raises": ("1 / 0", "exception"),
    "is no Python": ("def f(:", "syntax"),
    "reads input": ("input()", "exception"),
    "exits with success": ("raise SystemExit(0)", "exit"),
    "exits at once with success": ("import os\nos._exit(0)", "died"),
    "closes every descriptor": ("import os\nos.closerange(0, 256)", "died"),
    "claims success on every descriptor": (
        'import os\nfor d in range(64):\n  try: os.write(d, b\'["passed", ""]\\n\')\n'
        "  except OSError: pass",
        "forged",
    ),
    "writes a guessed sentinel and exits": (
        'import os\nfor d in range(64):\n  try: os.write(d, b\'["passed", "0"]\\n\')\n'
        "  except OSError: pass\nos._exit(0)",
        "forged",
    ),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", "died"),
    "takes all memory": ("x = bytearray(4 << 30)", "memory"),
    "recurses without end": ("def f(): return f()\nf()", "exception"),
    "fills the disk": (
        "f = open('x', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20)); f.flush()",
        "exception",
    ),
    "guards its main part": ("if __name__ == '__main__': raise SystemExit", "passed"),
    "writes in its own folder": ("open('x', 'w').write('x')", "passed"),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_program_ends_as_it_should(name: str) -> None:
    program, status = ENDS[name]
    assert run_program(program, QUICK).status == status


def test_forks_without_end_are_stopped() -> None:
    """Each of the children reports, so that what arrives is an exception or nothing readable."""
    if os.geteuid() == 0 and "identity" not in isolation().parts:
        pytest.skip("this system does not limit root's processes")
    outcome = run_program("import os\nwhile True: os.fork()", QUICK)
    assert outcome.status in ("exception", "forged", "died", "timeout")


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time\ntime.sleep(60)", "import os\nos.close(3)\nwhile True: pass"],
)
def test_an_endless_program_is_stopped(program: str) -> None:
    started = time.monotonic()
    assert not run_program(program, Limits(wall_s=1.0)).passed
    assert time.monotonic() - started < 20


def test_what_a_program_leaves_behind_is_killed() -> None:
    """Children that left the session live on after the program; no longer than its namespace."""
    if "pid" not in isolation().parts:
        pytest.skip("this system has no process namespace for us")
    program = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  time.sleep(60)\ntime.sleep(0.2)"
    )
    assert run_program(program, QUICK).passed
    deadline = time.monotonic() + 20
    while _living() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _living()


def _living() -> list[Path]:
    """Processes in the folder of one of our programs."""
    mark = f"dlm-decode-{os.getpid()}-"
    return [path for path in Path("/proc").glob("[0-9]*/cwd") if mark in _target(path)]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    if "landlock" not in isolation().parts:
        pytest.skip("this system has no Landlock")
    tmp_path.chmod(0o777)
    outside = tmp_path / "escaped"
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    kept.chmod(0o666)
    for act in (f"open({str(outside)!r}, 'w')", f"open({str(kept)!r}, 'a').write('x')",
                f"os.unlink({str(kept)!r})", f"os.symlink('x', {str(outside)!r})"):  # fmt: skip
        assert run_program(f"import os\n{act}", QUICK).status == "exception"
    assert not outside.exists()
    assert kept.read_text() == "as it was"


def test_there_is_no_network() -> None:
    if not {"net", "landlock"} & set(isolation().parts):
        pytest.skip("this system cannot take the network away")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        assert run_program(program, QUICK).status == "exception"


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    assert run_program("import os\nassert set(os.environ) <= {'LC_CTYPE'}", QUICK).passed


def test_other_processes_cannot_be_killed() -> None:
    program = f"import os\nos.kill({os.getpid()}, 15)"
    if not {"pid", "landlock"} & set(isolation().parts):
        pytest.skip("this system has neither namespaces nor Landlock")
    assert run_program(program, QUICK).status == "exception"


def test_a_program_without_any_isolation_part_still_ends() -> None:
    """Where a system offers nothing, limits, session and sentinel still hold."""
    bare = Isolation((), tuple(PARTS))
    assert run_program("assert True", QUICK, isolation_=bare).passed
    assert run_program("import os\nos._exit(0)", QUICK, isolation_=bare).status == "died"
    assert "can use the network" in bare.describe()


def test_outcomes_come_in_order() -> None:
    outcomes = run_programs(["assert 1", "assert 0", "assert 1"], QUICK, workers=2)
    assert [outcome.passed for outcome in outcomes] == [True, False, True]


def test_a_large_program_passes_whole() -> None:
    assert run_program("x = 0\n" + "x += 1\n" * 40_000 + "assert x == 40_000", QUICK).passed
