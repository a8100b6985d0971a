"""A model shared by several processes decodes as it does in one.

Two processes on the CPU (gloo) stand for two GPUs; all that they do together is in
`parallel_cases`, run once. The rest needs no second process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_decode import api, cli
from dlm_decode.errors import CapabilityError
from dlm_decode.graphs import check_static
from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.loading import fill, save_model, weight_shards
from dlm_decode.models.placement import place
from dlm_decode.models.published import Published
from dlm_decode.models.toy import random_model
from dlm_decode.ranks import Ranks
from dlm_decode.tensor_parallel import PLAN, Piece, span, split, vocabulary
from tests.families import TINY, made
from tests.unit import parallel_cases
from tests.unit.test_cli import byte_tokenizer

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ODD: dict[str, dict[str, Any]] = {
    "llada": {"vocab_size": 49, "embedding_size": 53},
    "dream": {"vocab_size": 49},
    "llada2": {"vocab_size": 47},
}
"""Vocabularies that do not divide by two, one of them with padding."""
BACKBONES = [
    name for name, (family, _) in TINY.items() if issubclass(FAMILIES.get(family), Backbone)
]


def model_of(name: str) -> Backbone:
    family, changes = TINY[name]
    model = random_model(family, 3, changes={**changes, **ODD.get(name, {})})
    assert isinstance(model, Backbone)
    return model


def part_of(whole: Backbone, folder: Path, rank: int, size: int = 2) -> Backbone:
    """The part of a saved model that `rank` would load; it has nobody to talk to."""
    files = Published(whole.published)
    part = type(whole).from_published(files, device="meta", dtype=whole.dtype)
    pieces = split(part, Ranks(rank, size))
    place(part, [CPU])
    fill(part, weight_shards(folder), pieces)
    assert isinstance(part, Backbone)
    return part


def run_pair(module: str, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Two processes of one group, as torchrun would start them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=900) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(p.args, p.returncode, *texts)
        for p, texts in zip(started, said, strict=True)
    ]


def test_two_processes_decode_as_one(tmp_path: Path) -> None:
    """Logits and statistics within 1e-5, the same tokens; a process that ends is missed."""
    for name in parallel_cases.CASES:
        save_model(model_of(name), tmp_path / name)
    first, second = run_pair("tests.unit.parallel_cases", str(tmp_path))
    assert (first.returncode, second.returncode) == (0, 7), first.stderr + second.stderr
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1] and set(found[0]) == {*parallel_cases.CASES, "half"}


def test_the_command_writes_once_and_what_one_process_writes(tmp_path: Path) -> None:
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    save_model(
        random_model(
            "llada",
            3,
            changes={
                "vocab_size": 262,
                "embedding_size": 262,
                "mask_token_id": 258,
                "eos_token_id": 256,
                "pad_token_id": 256,
            },
        ),
        model,
        byte_tokenizer(),
    )
    rows.write_text('{"prompt": "one"}\n{"prompt": "another, longer"}\n{"prompt": ""}\n')
    command = ["generate", "--model", str(model), "--input", str(rows), "--gen-length", "8"]
    command += ["--temperature", "0.8", "--cache", "dual"]
    assert cli.main([*command, "--output", str(tmp_path / "one.jsonl")]) == 1
    together = [*command, "--tensor-parallel", "--output", str(tmp_path / "two.jsonl")]
    first, second = run_pair("dlm_decode", *together)
    assert (first.returncode, second.returncode) == (1, 1), first.stderr + second.stderr
    assert first.stdout == second.stdout == second.stderr == ""
    assert "line 3" in first.stderr
    one, two = (
        {
            row["id"]: row["ids"]
            for row in map(json.loads, (tmp_path / name).read_text().splitlines())
        }
        for name in ("one.jsonl", "two.jsonl")
    )
    assert one == two and len(one) == 2


@pytest.mark.parametrize("name", BACKBONES)
def test_the_parts_of_all_processes_are_the_whole(name: str, tmp_path: Path) -> None:
    """Every family of the backbone is split by the plan alone; its parts together are the whole."""
    whole = model_of(name)
    save_model(whole, tmp_path)
    parts = [part_of(whole, tmp_path, rank) for rank in range(2)]
    for stored, part, view in whole.stored_parts():
        views = [other.weights()[stored] for other in parts]
        if part not in PLAN:
            assert torch.equal(views[0], view) and torch.equal(views[1], view)
        elif part == "qkv":
            c = whole.config
            sizes = [n * c.head_size for n in (c.heads, c.kv_heads, c.kv_heads)]
            halves = [v.split([size // 2 for size in sizes]) for v in views]
            merged = [torch.cat(pair) for pair in zip(*halves, strict=True)]
            assert torch.equal(torch.cat(merged), view)
        else:
            assert torch.equal(torch.cat(views, PLAN[part].dim), view)
    assert all((part.head is part.embed) == whole.config.tied for part in parts)


class Counted:
    """A file that counts what is read from it."""

    def __init__(self, file: Any) -> None:
        self.file, self.bytes = file, 0

    def seek(self, place: int) -> None:
        self.file.seek(place)

    def readinto(self, room: memoryview) -> int:
        count: int = self.file.readinto(room)
        self.bytes += count
        return count


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (Piece(0, (range(2, 5),)), lambda x: x[2:5]),
        (Piece(1, (range(1, 3),)), lambda x: x[:, 1:3]),
        (Piece(0, (range(0, 1), range(3, 6))), lambda x: torch.cat((x[:1], x[3:6]))),
        (Piece(2, (range(1, 2),)), lambda x: x[:, :, 1:2]),
    ],
)
def test_of_a_stored_tensor_no_more_is_read_than_the_piece(
    piece: Piece, expected: Any, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    stored = torch.randn(6, 4, 3)
    save_file({"other": torch.zeros(5), "x": stored}, tmp_path / "model.safetensors")
    shards = weight_shards(tmp_path)
    with open(shards.files["x"], "rb", buffering=0) as opened:
        file: Any = Counted(opened)
        found = shards.read("x", file, piece=piece)
    assert torch.equal(found, expected(stored))
    assert file.bytes == found.nbytes


@pytest.mark.parametrize("count", [1, 2, 7, 8, 49])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_spans_are_in_order_and_leave_nothing_out(count: int, size: int) -> None:
    for split_in in (span, vocabulary):
        spans = [split_in(count, size, rank) for rank in range(size)]
        assert [i for s in spans for i in s] == list(range(count))
    assert all(s.start % 4 == 0 for s in spans if s), "ids that share their noise are together"


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    model = made("dream")
    message = r"its key/value heads 2 can't be divided by 4; start 1 or 2$"
    with pytest.raises(CapabilityError, match=message):
        split(model, Ranks(0, 4))
    with pytest.raises(CapabilityError, match=r"query heads 4, key/value heads 2.* by 3"):
        split(model, Ranks(0, 3))
    experts = made("llada2", num_attention_heads=16, num_key_value_heads=16, head_dim=4)
    with pytest.raises(CapabilityError, match=r"experts' size 8, shared experts' size 8 can't"):
        split(experts, Ranks(0, 16))
    small = made(
        "dream",
        vocab_size=5,
        mask_token_id=4,
        eos_token_id=3,
        pad_token_id=3,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with pytest.raises(CapabilityError, match="can't share a vocabulary of 5 ids"):
        split(small, Ranks(0, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "klass"}, "this sampler reads whole rows of logits"),
        ({"sampler": "lrd"}, "this sampler reads whole rows of logits"),
        ({"temperature": 1.0, "options": {"top_k": 3}}, "top_k or top_p reads whole rows"),
        ({"temperature": 1.0, "options": {"top_p": 0.5}}, "top_k or top_p reads whole rows"),
        ({"cache": "interval"}, "cache interval looks into .* on several processes"),
        ({"cache": "sparse"}, "cache sparse looks into .* on several processes"),
    ],
)
def test_what_needs_whole_rows_of_logits_or_all_heads_says_so(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = made("llada")
    assert isinstance(whole, Backbone)
    save_model(whole, tmp_path)
    part = part_of(whole, tmp_path, 1)
    with pytest.raises(CapabilityError, match=message):
        api.Decoder(part, **settings)
    api.Decoder(whole, **settings)


def test_a_part_of_a_model_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    whole = made("llada")
    assert isinstance(whole, Backbone)
    save_model(whole, tmp_path)
    part = part_of(whole, tmp_path, 1)
    hidden = torch.zeros(2, whole.config.hidden_size)
    assert part.logits(hidden, 24, 48).shape == (2, 24)
    for start, stop in ((0, None), (0, 24), (23, 30)):
        with pytest.raises(CapabilityError, match="whole rows of logits"):
            part.logits(hidden, start, stop)
    with pytest.raises(CapabilityError, match="save it from one process"):
        save_model(part, tmp_path / "again")
    with pytest.raises(CapabilityError, match="graphs need a whole model"):
        check_static(part)


def test_a_process_alone_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(CapabilityError, match="this one is alone: start them with torchrun"):
        api.load(tensor_parallel=True)
    for extra in ({"compile": True}, {"prepack": True}, {"adapter": "x"}, {"device": "cpu,cpu"}):
        with pytest.raises(CapabilityError, match="tensor_parallel does not go with"):
            api.load(tensor_parallel=True, **extra)
    with pytest.raises(CapabilityError, match="bd3lm has layers of its own"):
        split(made("bd3lm"), Ranks(0, 2))


def test_who_shares_no_model_does_not_wait_for_what_sharing_needs() -> None:
    """Finding a family imports all of them; torch's DTensor takes longer than they do together."""
    code = "import sys; from dlm_decode import api; from dlm_decode.models import FAMILIES;"
    code += "FAMILIES.names(); print('torch.distributed.tensor' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_command_refuses_one_input_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--input", "-", "--tensor-parallel"]) == 2
    assert "name a file as --input" in capsys.readouterr().err
