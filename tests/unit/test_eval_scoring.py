"""Scores are exact: gold answers score 100% on every protocol, corrupted ones 0."""

from __future__ import annotations

import json
import os
import re
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from dlm_decode.errors import CapabilityError, UnknownNameError
from dlm_decode.eval import answers, arithmetic, puzzles
from dlm_decode.eval.code import assemble, cut, extract
from dlm_decode.eval.data import DataError, read_data
from dlm_decode.eval.problems import ProblemSet, family, load_problems
from dlm_decode.eval.protocols import FOLDER, expand, load_protocol, names, parse_protocol
from dlm_decode.eval.scoring import executes, score_answers, score_names, score_text
from dlm_decode.tasks.items import draw_distinct

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("DLM_DATA", ROOT.parent / "shared" / "data"))
EXECUTED = 5
"""How many programs a protocol's gold test runs; scripts/eval_gold.py runs all."""

PLAIN = [name for name in names() if not executes(load_protocol(name))]
CODE = [name for name in names() if executes(load_protocol(name))]


def problems_of(name: str, limit: int | None = None) -> ProblemSet:
    protocol = load_protocol(name)
    if not protocol.is_generated and not DATA.is_dir():
        pytest.skip(f"no benchmark data: name their folder in DLM_DATA ({DATA} is not there)")
    return load_problems(protocol, str(DATA), limit=limit)


@pytest.mark.parametrize("name", PLAIN)
def test_gold_scores_all_and_corrupted_nothing(name: str) -> None:
    limit = EXECUTED if name == "mini-mbpp" else None
    asked = problems_of(name, limit)
    for kind, expected in (("gold", True), ("corrupted", False)):
        pairs = [(problem, getattr(problem, kind)) for problem in asked.problems]
        scores = [scores for scores, _ in score_answers(asked.protocol, pairs)]
        assert scores and all(set(each) == set(score_names(asked.protocol)) for each in scores)
        assert {right for each in scores for right in each.values()} == {expected}


@pytest.mark.parametrize("name", CODE)
def test_gold_programs_pass_and_corrupted_ones_do_not(name: str) -> None:
    asked = problems_of(name, EXECUTED)
    for kind, expected in (("gold", True), ("corrupted", False)):
        pairs = [(problem, getattr(problem, kind)) for problem in asked.problems[:EXECUTED]]
        judged = score_answers(asked.protocol, pairs, allow_code_execution=True)
        assert {right for scores, _ in judged for right in scores.values()} == {expected}


def test_set_up_code_runs_after_the_solution() -> None:
    """MBPP 367 builds its data with a class that the solution defines."""
    asked = problems_of("mbpp-3shot")
    (problem,) = [p for p in asked.problems if p.id == "367"]
    ((scores, _),) = score_answers(
        asked.protocol, [(problem, problem.gold)], allow_code_execution=True
    )
    assert scores == {"raw": True, "extracted": True}


def test_programs_do_not_run_without_consent() -> None:
    asked = problems_of("humaneval-0shot", 1)
    with pytest.raises(CapabilityError, match="--allow-code-execution"):
        score_answers(asked.protocol, [(asked.problems[0], "")])


@pytest.mark.parametrize("name", names())
def test_every_protocol_file_is_whole(name: str) -> None:
    protocol = load_protocol(name)
    assert protocol.name == name
    assert protocol.id == f"{name}@{protocol.version}"
    assert re.fullmatch("[0-9a-f]{64}", protocol.sha256)
    assert protocol.primary in score_names(protocol)
    assert protocol.gen_length % protocol.block_length == 0


def test_protocols_refuse_unknown_keys_and_names() -> None:
    content = json.loads((FOLDER / "lists.json").read_text())
    with pytest.raises(ValueError, match="temperatur"):
        parse_protocol({**content, "temperatur": 0}, "")
    with pytest.raises(UnknownNameError, match="did you mean 'mbpp-3shot'"):
        load_protocol("mbpp-3-shot")
    assert expand(["bundled", "lists"]) == ["mini-gsm8k", "mini-mbpp", "lists", "grids"]


def test_a_problem_does_not_depend_on_the_limit() -> None:
    for name in ("gsm8k-lmeval-5shot-random", "countdown", "lists"):
        few, more = problems_of(name, 3), problems_of(name, 7)
        assert list(few.problems) == list(more.problems[:3])
        assert few.sha256 == more.sha256


def test_other_data_than_the_pinned_are_refused(tmp_path: Path) -> None:
    protocol = load_protocol("humaneval-0shot")
    with pytest.raises(DataError, match="--data"):
        read_data(protocol, str(tmp_path))
    (tmp_path / "HumanEval.jsonl").write_text('{"task_id": "x"}\n')
    with pytest.raises(DataError, match="--any-data-version"):
        read_data(protocol, str(tmp_path))
    read_data(protocol, str(tmp_path), any_version=True)
    with pytest.raises(DataError, match="164 documents, the data 1"):
        load_problems(protocol, str(tmp_path), any_version=True)
    (tmp_path / "HumanEval.jsonl").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_data(protocol, str(tmp_path), any_version=True)


# --- numbers ---


@pytest.mark.parametrize(
    ("text", "strict", "flexible", "numeric"),
    [
        ("so #### 18", True, True, True),
        ("it is $18.00", False, False, True),
        ("18", False, True, True),
        ("18 dollars, 2 eggs left", False, False, False),
        ("\\boxed{18}.", False, True, True),
        ("first \\boxed{18}, then 5 more words", False, False, True),
        ("= 18 / 2", False, False, False),
        ("#### 18 apples", True, True, True),
        ("#### 1,8", True, True, True),
        ("#### -18", False, False, False),
        ("nothing", False, False, False),
        ("#### 18%", True, True, True),
        ("", False, False, False),
    ],
)
def test_three_ways_to_read_a_number(
    text: str, strict: bool, flexible: bool, numeric: bool
) -> None:
    """Gold is 18; the first two are lm-eval's filters with their quirks."""
    gold = "9 * 2 = 18\n#### 18"
    assert answers.is_exact_match(answers.strict(text), gold) is strict
    assert answers.is_exact_match(answers.flexible(text), gold) is flexible
    assert (answers.numeric(text) == Decimal(18)) is numeric


@pytest.mark.parametrize(
    "text", ["9" * 5000, "1e999999", "\\boxed{" * 500, "٣", "#### \u00b2", "."]
)
def test_odd_numbers_do_not_break_the_reader(text: str) -> None:
    answers.numeric(text)
    answers.is_exact_match(answers.flexible(text), "#### 1")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("7 / 2", Fraction(7, 2)), ("1 / 0", None),
        ("2 ** 9", None), ("__import__('os').system('true')", None), ("1.5 + 1", None),
        ("-1 + 2", None), ("a + 1", None), ("True + 1", None), ("(" * 90 + "1" + ")" * 90, 1),
        ("1 +", None), ("", None), ("1 + " * 200 + "1", None), ("9 // 2", None),
    ],
)  # fmt: skip
def test_arithmetic_is_parsed_and_never_run(text: str, value: Fraction | None) -> None:
    found = arithmetic.compute(text)
    assert (found and found[0]) == value


def test_equations() -> None:
    assert arithmetic.is_true_equation("2 * 3 = 7 - 1")
    assert not arithmetic.is_true_equation("2 * 3 = 7")
    assert not arithmetic.is_true_equation("1 = 1 = 1")


# --- code ---


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Sure!\n```python\ndef f():\n    return 1\n```\nDone.", "def f():\n    return 1"),
        ("```\nx = f()\n```", "x = f()"),
        ("```python\ndef f():\n    return 1", "def f():\n    return 1"),
        ("```bash\nls\n```\n```py\nx = 1\n```", "x = 1"),
        ("[BEGIN]\nx = 1\n[DONE]\nand so on", "x = 1"),
        ("Here it is:\ndef f():\n    return 1\nThat is all there is.", "def f():\n    return 1"),
        ("import re\r\ndef f():\r\n    return 1\r\n", "import re\ndef f():\n    return 1"),
        ("def f():\n    return (1,\nhere it stops", "def f():\n    return (1,\nhere it stops"),
        ("no code here at all", "no code here at all"),
        ("", ""),
    ],
)
def test_code_is_found_in_an_answer(text: str, code: str) -> None:
    assert extract(text) == code


def test_extraction_of_garbage_is_quick() -> None:
    started = time.process_time()
    extract("(\n" * 3000)
    extract("\n".join(f"word {i} and 'more" for i in range(1500)))
    assert time.process_time() - started < 10


def test_cut_takes_the_earliest_stop() -> None:
    assert cut("one two three", ["three", "two"]) == "one "
    assert cut("one", ["", "x"]) == "one"
    assert assemble(["a", "", "b\n\n"]) == "a\nb\n"


# --- generated tasks ---


@pytest.mark.parametrize("name", sorted(puzzles.PUZZLES))
def test_puzzles_are_right_and_their_prompts_do_not_tell_the_answer(name: str) -> None:
    made = puzzles.PUZZLES[name]
    for item in draw_distinct(made, 60, seed=1, split="test"):
        assert made.verify(item, item.answer)
        assert made.verify(item, f"Well, my answer is this:\n{item.answer}")
        assert puzzles.is_whole_answer(item, f" {item.answer}\n")
        assert not puzzles.is_whole_answer(item, f"It is {item.answer}")
        assert not made.verify(item, "")
        assert not made.verify(item, item.prompt.partition("\n")[0])


def test_list_operations_accept_every_right_answer_and_no_other() -> None:
    items = draw_distinct(puzzles.PUZZLES["list-operations"], 200, seed=2, split="test")
    seen = {item.meta["operation"]: item for item in items}
    assert set(seen) == set(puzzles.OPERATIONS)
    shuffle = seen["shuffle"]
    line = list(shuffle.meta["line"])
    assert puzzles.verify_list(shuffle, str([*line[1:], line[0]]))
    assert not puzzles.verify_list(shuffle, str(line))
    remove = seen["remove-random"]
    assert puzzles.verify_list(remove, ", ".join(remove.meta["line"]).join("[]")) is False
    assert puzzles.verify_list(remove, ", ".join(remove.meta["line"][1:]).join("[]"))


def test_countdown_uses_each_number_once() -> None:
    item = next(iter(draw_distinct(puzzles.PUZZLES["countdown"], 1, seed=3, split="test")))
    assert not puzzles.verify_countdown(item, str(item.meta["target"]))
    assert not puzzles.verify_countdown(item, f"{item.answer} + 0")
    assert puzzles.verify_countdown(item, f"{item.answer} = {item.meta['target']}")


def test_families_are_found_by_name() -> None:
    assert family("grids").name == "grids"
    assert family("countdown").name == "countdown"


def test_raw_scores_are_cut_at_stops_and_extracted_ones_are_not() -> None:
    asked = problems_of("gsm8k-5shot-fixed", 1)
    (problem,) = asked.problems
    told = f"{problem.gold}\n\nQuestion: and 7?\nAnswer: 7"
    assert all(score_text(asked.protocol, problem, told).values())
