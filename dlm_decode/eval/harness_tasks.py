"""Our protocols as tasks of lm-evaluation-harness: same prompts, same scores, no data from the hub.

lm_eval.simple_evaluate(
    model=DlmDecodeLM(...), tasks=[harness_task(load_problems(protocol))],
    task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
    apply_chat_template=True,
)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset

from dlm_decode.eval.problems import ProblemSet
from dlm_decode.eval.scoring import require_consent, score_answers, score_names


def harness_task(
    questions: ProblemSet, *, allow_code_execution: bool = False, gen_length: int | None = None
) -> dict[str, Any]:
    """A task configuration. Examples are part of the prompt, so they cannot change with the number
    of processes or a limit; each protocol score is a metric.
    """
    protocol = questions.protocol
    require_consent(protocol, allow_code_execution)
    problems = {problem.id: problem for problem in questions.problems}
    rows = [{"id": p.id, "prompt": p.prompt, "prefix": p.prefix} for p in questions.problems]

    def scores(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
        pair = (problems[doc["id"]], results[0])
        (judged, _), = score_answers(
            protocol, [pair], allow_code_execution=allow_code_execution
        )  # fmt: skip
        return {name: float(right) for name, right in judged.items()}

    return {
        "task": protocol.name,
        "custom_dataset": _dataset(rows),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "",
        "gen_prefix": "{{prefix}}" if protocol.answer_prefix else None,
        "num_fewshot": 0,
        "generation_kwargs": {
            "until": list(protocol.stops),
            "do_sample": False,
            "max_gen_toks": gen_length or protocol.gen_length,
        },
        "process_results": scores,
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in score_names(protocol)
        ],
        "metadata": {"version": protocol.version},
    }


def _dataset(rows: list[dict[str, str]]) -> Callable[..., dict[str, Dataset]]:
    def make(**settings: Any) -> dict[str, Dataset]:
        return {"test": Dataset.from_list(rows)}

    return make
