"""Every statistics kernel gives what the reference gives: ids exactly, ties to the smallest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.kernels import VARIABLE, HeadPlan, Kernel, Scored, TileStats, checked, kernel_for
from dlm_decode.kernels.reference import first_argmax, tile_stats
from tests.unit.kernel_cases import Case, cases

ROOT = Path(__file__).resolve().parents[2]
CASES = list(cases())
CPU = torch.device("cpu")

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (extra `triton`)"
)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """All cases through the Triton kernels, by Triton's interpreter: a process begins with it."""
    file = tmp_path_factory.mktemp("kernels") / "found.pt"
    chosen = {"TRITON_INTERPRET": "1", VARIABLE: "triton"}
    command = [sys.executable, "-m", "tests.unit.kernel_cases", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | chosen, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(file)
    assert isinstance(found, dict)
    return found


def assert_reference(case: Case, found: dict[str, Tensor]) -> None:
    """Ids exactly, numbers to 1e-5 of fp64 (relative to what is above 1)."""
    exact, single = case.statistics(torch.float64), case.statistics(torch.float32)
    assert set(found) == set(exact)
    for name, value in exact.items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(
                found[name].double(), value.double(), rtol=1e-5, atol=1e-5, msg=name
            )
        else:  # a draw adds fp32 noise to fp32 logits
            expected = single[name] if name == "sampled" else value
            assert torch.equal(found[name], expected), name


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_gives_the_reference(
    case: Case, interpreted: dict[str, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    assert_reference(case, interpreted[case.name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_gives_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan, and so one function to compile, over all kinds of fp32 logits."""
    chosen = [case for case in CASES if case.name.endswith("-drawn") and "half" not in case.name]
    monkeypatch.setenv(VARIABLE, "compiled")
    found = {case.name: case.statistics() for case in chosen}
    monkeypatch.setenv(VARIABLE, "reference")
    for case in chosen:
        assert_reference(case, found[case.name])


def test_ties_and_draws_are_really_there() -> None:
    """Of the cases: the best logit is shared, and a draw is not the best."""
    tied = next(case for case in CASES if case.name == "ties-raw")
    found = tied.statistics()
    assert (found["p1"] == found["p2"]).any()
    assert (found["sampled"] != found["top1"]).all()


# ------------------------------------------------------------------------------ offline for sm_90

POINTERS = {"keys": "*i64", "positions": "*i64", "commits": "*i64", "floats": "*fp32"}
SIGNATURES = {
    "_parts": {"stride": "i32", "columns": "i32", "start": "i32", "temperature": "fp32"}
    | POINTERS
    | {"ints": "*i64"},
    "_whole": {"floats": "*fp32", "ints": "*i64", "found": "*fp32", "ids": "*i64"}
    | {"parts": "i32", "temperature": "fp32"},
}


def resources(logits: str | None, everything: bool, folder: Path, **options: int) -> dict[str, int]:
    """What a kernel takes on an sm_90 device, as the object file says.

    By the compiler and assembler that Triton brings along; no GPU is needed.
    """
    from triton import compile, knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dlm_decode.kernels import fused

    kernel = fused._parts if logits else fused._whole
    values = dict.fromkeys(("SECOND", "MOMENT", "TEMPERED", "DRAW"), everything)
    fixed = {"STREAM": 0, "BLOCK": fused.BLOCK} if logits else {"PARTS": 32}
    types = SIGNATURES[kernel.__name__] | ({"logits": logits} if logits else {})
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values | fixed)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    file = folder / "kernel.cubin"
    file.write_bytes(made.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}


@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("everything", [False, True], ids=["least", "all"])
@pytest.mark.parametrize("logits", ["*fp32", "*bf16", None], ids=["fp32", "bf16", "merge"])
def test_compiles_for_hopper_without_spills(
    logits: str | None, everything: bool, tmp_path: Path
) -> None:
    """And two programs of the large kernel fit into a multiprocessor's 65,536 registers."""
    warps = 8 if logits else 1
    taken = resources(logits, everything, tmp_path, num_warps=warps)
    assert taken["STACK"] == taken["LOCAL"] == 0
    assert 2 * taken["REG"] * 32 * warps <= 65536


@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_spills_would_be_seen(tmp_path: Path) -> None:
    """Negative control: the same kernel with too few registers for it."""
    assert resources("*fp32", True, tmp_path, num_warps=8, maxnreg=40)["STACK"] > 0


# ----------------------------------------------------------------------------------------- choice


def test_the_environment_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, 4)
    for name in ("", "auto", "reference"):
        monkeypatch.setenv(VARIABLE, name)
        assert kernel_for(logits) is tile_stats
    monkeypatch.setenv(VARIABLE, "compiled")
    assert kernel_for(logits).__module__ == "dlm_decode.kernels.compiled"
    monkeypatch.setenv(VARIABLE, "fastest")
    with pytest.raises(OptionError, match="one of auto, reference, compiled, triton"):
        kernel_for(logits)


def test_triton_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(CapabilityError, match=r"needs a GPU|pip install"):
        kernel_for(torch.zeros(1, 4))
    assert kernel_for(torch.zeros(1, 4, dtype=torch.float64)) is tile_stats


def last_of_equals(logits: Tensor, start: int, scored: Scored, plan: HeadPlan) -> TileStats:
    """A wrong kernel: of equal logits it takes the last."""
    found = tile_stats(logits.clone(), start, scored, plan)
    last = logits.shape[1] - 1 - first_argmax(logits.flip(-1))
    return replace(found, raw=replace(found.raw, id=last + start))


def failing(logits: Tensor, start: int, scored: Scored, plan: HeadPlan) -> TileStats:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("kernel", "message"), [(last_of_equals, "results differ"), (failing, "no such instruction")]
)
def test_a_kernel_that_fails_on_a_device_is_not_used_there(
    kernel: Callable[..., TileStats], message: str
) -> None:
    with pytest.warns(UserWarning, match=message):
        assert checked(kernel, CPU) is tile_stats


def test_a_kernel_that_agrees_is_used() -> None:
    def same(logits: Tensor, start: int, scored: Scored, plan: HeadPlan) -> TileStats:
        return tile_stats(logits, start, scored, plan)

    kernel: Kernel = same
    assert checked(kernel, CPU) is kernel
