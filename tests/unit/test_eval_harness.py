"""lm-evaluation-harness: its prompts and scores are ours, and its traps do not catch the adapter.

Skipped where lm-eval is not installed; scripts/test_extras.sh installs it and runs this.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlm_decode.cli import main
from dlm_decode.errors import OptionError
from dlm_decode.eval.problems import ProblemSet, load_problems
from dlm_decode.eval.protocols import load_protocol
from dlm_decode.eval.results import SUMMARY
from dlm_decode.eval.sandbox import run_program
from dlm_decode.eval.scoring import score_answers
from tests.unit.eval_cases import write_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("DLM_DATA", ROOT.parent / "shared" / "data"))
DOCUMENTS = int(os.environ.get("DLM_PARITY_DOCUMENTS", 12))
NUMBERS = (
    "{gold}", "I think {number}", "${number}.00", "{number}.", "\\boxed{{{number}}}",
    "#### {number}",
    "The answer is {number}.", "#### 7 no {number} apples and 3 pears", "nothing",
    "Question: {number}", "{number},000",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def offline() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class FakeCodeEval:
    """lm-eval fetches `code_eval` from the hub; ours runs what it would run, in our sandbox."""

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], dict[str, Any]]:
        passed = [
            float(run_program(f"{tries[0]}\n{reference}").passed)
            for tries, reference in zip(predictions, references, strict=True)
        ]
        return {"pass@1": sum(passed) / len(passed)}, {}


def stock_task(name: str, data: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    """A task of lm-eval as it is published, with its data read from local files."""
    import evaluate
    from lm_eval.tasks._yaml_loader import load_yaml

    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(evaluate, "load", lambda *_, **__: FakeCodeEval())
        config = load_yaml(Path(str(files("lm_eval") / "tasks" / name)))
    paths = {split: str(DATA / file) for split, file in data.items()}
    config |= {"dataset_path": "json", "dataset_kwargs": {"data_files": paths}}
    config.pop("dataset_name", None)
    config.pop("tag", None)
    return {**config, **changes}


GSM8K = {"test": "gsm8k_test.jsonl", "train": "gsm8k_train.jsonl"}
HUMANEVAL = {"test": "HumanEval.jsonl"}
PARITY = {
    "gsm8k-5shot-fixed": ("gsm8k/gsm8k.yaml", GSM8K, {"fewshot_config": {"sampler": "first_n"}}),
    "gsm8k-lmeval-5shot-random": ("gsm8k/gsm8k.yaml", GSM8K, {}),
    "gsm8k-cot-0shot": ("gsm8k/gsm8k-cot-zeroshot.yaml", GSM8K, {}),
    "mbpp-3shot": (
        "mbpp/mbpp.yaml",
        {"test": "mbpp.jsonl"},
        {"process_docs": lambda docs: docs.filter(lambda d: 11 <= d["task_id"] <= 510)},
    ),
    "humaneval-0shot": ("humaneval/humaneval.yaml", HUMANEVAL, {}),
    "humaneval-instruct": ("humaneval/humaneval_instruct.yaml", HUMANEVAL, {}),
}
"""Protocols that claim parity: lm-eval's task, its data, and what must be set to make it fixed."""
SCORES = {
    "exact_match,strict-match": "strict",
    "exact_match,flexible-extract": "flexible",
    "pass_at_1,none": "raw",
    "pass@1,create_test": "raw",
}


def replaying_model(answers: Mapping[str, str]) -> Any:
    """A model of lm-eval that gives prepared answers by prompt, cut as every adapter must."""
    from lm_eval.api.model import LM

    from dlm_decode.eval.code import cut

    class Replay(LM):  # type: ignore[misc]
        seen: list[str] = []  # noqa: RUF012

        def generate_until(self, requests: list[Any]) -> list[str]:
            self.seen += [request.args[0] for request in requests]
            return [cut(answers.get(r.args[0], ""), r.args[1]["until"]) for r in requests]

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

    return Replay()


def varied_answers(asked: ProblemSet) -> list[str]:
    """Right, wrong and oddly written answers, in turn."""
    if asked.protocol.scorer in ("mbpp", "humaneval"):
        kinds = ("gold", "corrupted")
        return [getattr(p, kinds[i % 3 % 2]) for i, p in enumerate(asked.problems)]
    return [
        NUMBERS[i % len(NUMBERS)].format(gold=p.gold, number=p.record["number"])
        for i, p in enumerate(asked.problems)
    ]


@pytest.mark.parametrize("name", PARITY)
def test_prompts_and_scores_are_those_of_lm_eval(name: str) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no benchmark data: name their folder in DLM_DATA ({DATA} is not there)")
    import lm_eval
    from lm_eval.tasks import TaskManager

    yaml, data, changes = PARITY[name]
    asked = load_problems(load_protocol(name), str(DATA), limit=DOCUMENTS)
    answers = varied_answers(asked)
    prompts = [problem.prompt + problem.prefix for problem in asked.problems]
    replay = replaying_model(dict(zip(prompts, answers, strict=True)))
    found = lm_eval.simple_evaluate(
        model=replay,
        tasks=[stock_task(yaml, data, **changes)],
        task_manager=TaskManager(include_defaults=False),
        limit=DOCUMENTS,
        bootstrap_iters=0,
        fewshot_random_seed=1234,
        confirm_run_unsafe_code=True,
    )
    assert replay.seen == prompts
    judged = score_answers(
        asked.protocol, list(zip(asked.problems, answers, strict=True)), allow_code_execution=True
    )
    (theirs,) = found["results"].values()
    for key, ours in SCORES.items():
        if key in theirs:
            right = [
                scores[ours] and not problem.record.get("test_setup_code")
                for problem, (scores, _) in zip(asked.problems, judged, strict=True)
            ]  # lm-eval leaves set-up code out, so that MBPP 367 can't pass there
            mean = sum(right) / len(right)
            assert theirs[key] == pytest.approx(mean), key
    assert {*theirs} & {*SCORES}


# --- the adapter ---


def harness(model: Path, **settings: Any) -> Any:
    from dlm_decode.eval.harness import DlmDecodeLM

    given = {"gen_length": 8, "block_length": 4, "mc_num": 4, "mc_batch_size": 2, **settings}
    return DlmDecodeLM(pretrained=str(model), **given)


def instances(prompts: Sequence[str], **settings: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    made = {"until": [], "do_sample": False, **settings}
    return [
        Instance("generate_until", {}, (prompt, dict(made)), i, metadata=("task", i, 1))
        for i, prompt in enumerate(prompts)
    ]


def test_answers_depend_neither_on_order_nor_on_batches(model: Path) -> None:
    prompts = ["Sort the list [ ant ]", "Copy it", "Sort the list [ ant ]", "7 + 8"]
    one = harness(model, temperature=1.0).generate_until(instances(prompts))
    many = harness(model, temperature=1.0, batch_size=4).generate_until(instances(prompts))
    assert one == many
    assert one[0] != one[2], "equal requests are different draws"
    assert (
        harness(model).generate_until(instances(prompts[::-1]))
        == (harness(model).generate_until(instances(prompts))[::-1])
    )


def test_stops_are_cut_at_the_earliest(model: Path) -> None:
    (whole,) = harness(model).generate_until(instances(["Copy it"]))
    first, second = whole[2:4], whole[4:6]
    (stopped,) = harness(model).generate_until(instances(["Copy it"], until=[second, first]))
    assert stopped == whole[: whole.find(first)]


def test_a_request_asks_for_its_own_temperature_and_length(model: Path) -> None:
    lm = harness(model, gen_length=None)
    lm.generate_until(instances(["Copy it"], max_gen_toks=4, do_sample=True, temperature=0.7))
    assert set(lm._decoders) == {None, 0.7}
    assert lm.get_model_info()["dlm_decode"]["requests"] == 1


def test_repeated_requests_are_counted_once(model: Path) -> None:
    """lm-eval pads short ranks with copies of their last request."""
    lm = harness(model)
    (request,) = instances(["Copy it"])
    lm.generate_until([request, request])
    assert lm.get_model_info()["dlm_decode"]["requests"] == 1


def test_a_response_cache_belongs_to_one_decoder(model: Path) -> None:
    """lm-eval's keys hold the prompt alone: another decoder would get this one's answers."""
    stored: dict[str, Any] = {}
    harness(model).set_cache_hook(SimpleNamespace(dbdict=stored))
    harness(model).set_cache_hook(SimpleNamespace(dbdict=stored))
    with pytest.raises(OptionError, match="another decoder"):
        harness(model, sampler="llada").set_cache_hook(SimpleNamespace(dbdict=stored))


def test_every_answer_is_cached_as_it_comes(model: Path) -> None:
    kept: list[tuple[str, Any]] = []
    lm = harness(model)
    hook = SimpleNamespace(
        dbdict=None, add_partial=lambda kind, args, out: kept.append((kind, out))
    )
    lm.set_cache_hook(hook)
    answers = lm.generate_until(instances(["Copy it", "7 + 8"]))
    assert sorted(out for _, out in kept) == sorted(answers)


def test_likelihoods_are_the_requests_own(model: Path) -> None:
    from lm_eval.api.instance import Instance

    lm = harness(model)
    pairs = [("Copy it", " ant"), ("7 + 8 ", "= 15"), ("", "owl")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    forward = lm.loglikelihood(requests)
    assert lm.loglikelihood(requests[::-1]) == forward[::-1]
    assert all(value < 0 and greedy is False for value, greedy in forward)
    assert lm.encode_pair("7 + 8 ", "= 15") == lm.encode_pair("7 + 8", " = 15")
    with pytest.raises(NotImplementedError, match="not defined"):
        lm.loglikelihood_rolling(requests)
    ends = harness(model, nll="dream").encode_pair("a", "b")[1][-1]
    assert ends == lm.loaded.model.info.end_ids[0]
    assert isinstance(harness(model, check_greedy=True).loglikelihood(requests[:1])[0][1], bool)


def test_chat_templates_can_be_left_open(model: Path) -> None:
    lm = harness(model)
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    assert lm.apply_chat_template(history[:1]).endswith("<|assistant|>")
    assert lm.apply_chat_template(history, add_generation_prompt=False).endswith("<|assistant|>So")
    assert lm.chat_template(False) is None
    assert "<|user|>" in lm.chat_template(True)


def test_mistakes_are_told(model: Path) -> None:
    with pytest.raises(OptionError, match="KEY:VALUE"):
        harness(model, options="threshold")
    with pytest.raises(OptionError, match="mc_num"):
        harness(model, mc_num=3)
    with pytest.raises(OptionError, match="batch_size"):
        harness(model, batch_size="auto")


def test_our_protocols_score_the_same_through_lm_eval(model: Path, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from dlm_decode.eval.harness_tasks import harness_task

    name = str(os.environ.get("DLM_PARITY_MODEL", model))
    questions = load_problems(load_protocol("lists"), limit=DOCUMENTS)
    lm = harness(Path(name), gen_length=16, block_length=16, batch_size=4, dtype="float32")
    theirs = lm_eval.simple_evaluate(
        model=lm,
        tasks=[harness_task(questions)],
        task_manager=TaskManager(include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    asked = ["--limit", str(DOCUMENTS), "--gen-length", "16", "--block-length", "16", "--quiet"]
    given = ["--model", name, "--dtype", "float32", "--out", str(tmp_path)]
    assert main(["eval", "lists", *asked, *given]) == 0
    figures = json.loads((tmp_path / SUMMARY).read_text())["figures"]
    assert theirs["results"]["lists"]["correct,none"] == figures["accuracy"]["correct"]["value"]
    assert theirs["config"]["dlm_decode"]["forwards"] == figures["forwards"]


def test_the_model_is_registered_by_our_command() -> None:
    from lm_eval.api.registry import model_registry

    from dlm_decode.eval.harness import DlmDecodeLM
    from dlm_decode.eval.harness_cli import NAME, register

    register()
    register()
    assert model_registry.get(NAME) is DlmDecodeLM
