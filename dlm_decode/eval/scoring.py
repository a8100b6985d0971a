"""Scores of answers: pure functions of a problem and a text, plus the running of programs.

A text is what was decoded before the first end id; each scorer cuts it at the protocol's stop
strings itself, so that one generation gives all of a task's scores.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation

from dlm_decode.errors import CapabilityError
from dlm_decode.eval import answers, puzzles
from dlm_decode.eval.code import assemble, cut, extract
from dlm_decode.eval.problems import Problem, family
from dlm_decode.eval.protocols import Protocol
from dlm_decode.eval.sandbox import Limits, Outcome, run_programs

Scores = Mapping[str, bool]
Notes = Mapping[str, str]


def score_names(protocol: Protocol) -> tuple[str, ...]:
    """The scores of a protocol, the primary one first."""
    found = {
        "gsm8k": ("strict", "flexible", "numeric"),
        "gsm8k-cot": ("strict", "flexible", "numeric"),
        "mbpp": ("raw", "extracted"),
        "humaneval": ("raw", "extracted"),
        "verify": ("correct",),
    }[protocol.scorer]
    if protocol.scorer == "verify" and protocol.data["family"] in puzzles.PUZZLES:
        found = ("correct", "strict")
    return (protocol.primary, *(name for name in found if name != protocol.primary))


def executes(protocol: Protocol) -> bool:
    """Whether scoring runs generated programs."""
    return protocol.scorer in PROGRAMS


def score_text(protocol: Protocol, problem: Problem, text: str) -> Scores:
    """The scores of one answer that is not a program."""
    shown = cut(text, protocol.stops)
    if protocol.scorer == "verify":
        return _verified(problem, shown)
    pattern = answers.STRICT if protocol.scorer == "gsm8k" else answers.STRICT_COT
    return _numbers(problem, shown, answers.strict(shown, pattern))


def _verified(problem: Problem, text: str) -> Scores:
    assert problem.item is not None
    scores = {"correct": family(problem.item.family).verify(problem.item, text)}
    if problem.item.family in puzzles.PUZZLES:
        scores["strict"] = puzzles.is_whole_answer(problem.item, text)
    return scores


def _numbers(problem: Problem, text: str, strict: str) -> Scores:
    gold = problem.record["answer"]
    return {
        "strict": answers.is_exact_match(strict, gold),
        "flexible": answers.is_exact_match(answers.flexible(text), gold),
        "numeric": _equals(answers.numeric(text), problem.record["number"]),
    }


def _equals(value: Decimal | None, gold: str) -> bool:
    try:
        return value is not None and value == Decimal(gold.replace(",", ""))
    except InvalidOperation:
        return False


def _mbpp_programs(protocol: Protocol, problem: Problem, text: str) -> Mapping[str, str]:
    record = problem.record
    tail = [record.get("test_setup_code", ""), *record["test_list"]]
    head = record.get("test_imports", [])
    solutions = {"raw": cut(text, protocol.stops), "extracted": extract(problem.prefix + text)}
    return {name: assemble([*head, code, *tail]) for name, code in solutions.items()}


def _humaneval_programs(protocol: Protocol, problem: Problem, text: str) -> Mapping[str, str]:
    """`raw`: the text continues the head as lm-eval cuts it. `extracted`: a whole function
    follows the head if the text holds one, else the text continues it.
    """
    record = problem.record
    test = [record["test"], f"check({record['entry_point']})"]
    raw = cut(text, [*protocol.stops, "```"] if problem.prefix else protocol.stops)
    extracted = extract(problem.prefix + text)
    continued = record["prompt"] + raw
    whole = record["prompt"] + "\n" + extracted if _defines(extracted) else continued
    return {"raw": assemble([continued, *test]), "extracted": assemble([whole, *test])}


def _defines(code: str) -> bool:
    """Whether `code` is Python with a function at its top level."""
    try:
        return any(isinstance(node, ast.FunctionDef) for node in ast.parse(code).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


PROGRAMS: Mapping[str, Callable[[Protocol, Problem, str], Mapping[str, str]]] = {
    "mbpp": _mbpp_programs,
    "humaneval": _humaneval_programs,
}


def require_consent(protocol: Protocol, allowed: bool) -> None:
    """Raise `CapabilityError` unless running generated programs was allowed."""
    if executes(protocol) and not allowed:
        raise CapabilityError(
            f"task {protocol.name} runs programs that a model wrote: add --allow-code-execution"
        )


def score_answers(
    protocol: Protocol,
    pairs: Iterable[tuple[Problem, str]],
    *,
    allow_code_execution: bool = False,
    workers: int | None = None,
    limits: Limits | None = None,
) -> list[tuple[Scores, Notes]]:
    """Scores of many answers in order, and notes on programs that did not pass."""
    if not executes(protocol):
        return [(score_text(protocol, problem, text), {}) for problem, text in pairs]
    require_consent(protocol, allow_code_execution)
    programs = [PROGRAMS[protocol.scorer](protocol, problem, text) for problem, text in pairs]
    outcomes = _run_each_once(programs, limits, workers)
    return [_judged({name: outcomes[text] for name, text in each.items()}) for each in programs]


def _run_each_once(
    programs: Sequence[Mapping[str, str]], limits: Limits | None, workers: int | None
) -> Mapping[str, Outcome]:
    """Outcomes by program text: raw and extracted are often the same program."""
    distinct = list(dict.fromkeys(text for each in programs for text in each.values()))
    results = run_programs(distinct, limits, workers=workers)
    return dict(zip(distinct, results, strict=True))


def _judged(outcomes: Mapping[str, Outcome]) -> tuple[Scores, Notes]:
    scores = {name: outcome.passed for name, outcome in outcomes.items()}
    notes = {name: outcome.status for name, outcome in outcomes.items() if not outcome.passed}
    return scores, notes
