"""Problems of a protocol: each document's prompt, examples included, and its gold answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlm_decode.eval.answers import gold_number
from dlm_decode.eval.data import Data, DataError, Record, digest, read_data
from dlm_decode.eval.protocols import Protocol
from dlm_decode.eval.puzzles import PUZZLES
from dlm_decode.tasks import FAMILIES
from dlm_decode.tasks.items import Family, Item, draw_distinct


@dataclass(frozen=True)
class Problem:
    """One document ready to ask: `prompt` before any chat template, `prefix` that begins the
    answer, the `record` it comes from (an `Item` as `item` for generated families).
    """

    id: str
    prompt: str
    prefix: str
    gold: str
    corrupted: str
    record: Record
    item: Item | None = None


@dataclass(frozen=True)
class ProblemSet:
    """The problems of a run and the sha256 of the data they were made from."""

    protocol: Protocol
    problems: Sequence[Problem]
    sha256: Mapping[str, str]


def load_problems(
    protocol: Protocol,
    location: str | None = None,
    *,
    limit: int | None = None,
    any_version: bool = False,
) -> ProblemSet:
    """The first `limit` problems (None: all). A problem does not depend on the limit."""
    if protocol.is_generated:
        return _generated(protocol, limit)
    data = read_data(protocol, location, any_version=any_version)
    documents = _documents(protocol, data)
    shots = _shots(protocol, data)
    problems = [
        _problem(protocol, identifier, fields, shots())
        for identifier, fields in documents[:limit]
    ]  # fmt: skip
    return ProblemSet(protocol, problems, data.sha256)


def family(name: str) -> Family:
    """A generated family by name, the bundled model's or a puzzle."""
    return PUZZLES[name] if name in PUZZLES else FAMILIES[name]


def _documents(protocol: Protocol, data: Data) -> list[tuple[str, Record]]:
    """Ids and fields of all documents, in the data's order."""
    wanted = protocol.documents
    key = protocol.data["id_field"]
    found = [
        (str(index if key is None else record[key]), with_fields(record))
        for index, record in enumerate(data.splits[wanted["split"]])
        if "from" not in wanted or wanted["from"] <= record[key] <= wanted["to"]
    ]
    if len(found) != wanted["count"]:
        raise DataError(f"{protocol.id} has {wanted['count']} documents, the data {len(found)}")
    return found


def with_fields(record: Record) -> Record:
    """A record with the fields that templates use beside its own."""
    more: dict[str, Any] = {}
    if "####" in str(record.get("answer", "")):
        more["number"] = gold_number(record["answer"])
    if "test_list" in record:
        more["tests"] = "\n".join(record["test_list"])
    return {**record, **more}


def _shots(protocol: Protocol, data: Data) -> Callable[[], Sequence[Record]]:
    """A function that gives the next document's examples."""
    chosen = protocol.shots
    if chosen is None:
        return lambda: []
    pool = data.splits[chosen["split"]]
    if "random" in chosen:
        rng = random.Random(chosen["seed"])  # one stream over the documents, as lm-eval draws
        return lambda: rng.sample(list(pool), chosen["random"])
    if "first" in chosen:
        return lambda: pool[: chosen["first"]]
    by_id = {record[protocol.data["id_field"]]: record for record in pool}
    return lambda: [by_id[identifier] for identifier in chosen["ids"]]


def _problem(
    protocol: Protocol, identifier: str, fields: Record, shots: Sequence[Record]
) -> Problem:
    template = protocol.template
    examples = [
        template["question"].format_map(shot) + template["target"].format_map(shot)
        for shot in map(with_fields, shots)
    ]
    question = template["question"].format_map(fields)
    return Problem(
        id=identifier,
        prompt=template["between"].join([*examples, question]),
        prefix=protocol.answer_prefix.format_map(fields),
        gold=protocol.gold.format_map(fields),
        corrupted=protocol.corrupted.format_map(fields),
        record=fields,
    )


def _generated(protocol: Protocol, limit: int | None) -> ProblemSet:
    """Held-out items; examples are training items, so they are never asked."""
    wanted = protocol.documents
    made = family(protocol.data["family"])
    items = draw_distinct(made, wanted["count"], seed=wanted["seed"], split="test")
    count = (protocol.shots or {}).get("generated", 0)
    shots = [asdict(shot) for shot in _examples(made, count)]
    problems = [_generated_problem(protocol, item, shots) for item in items]
    found = digest([(p.prompt, p.gold) for p in problems])
    if found != protocol.data["sha256"]:
        raise DataError(
            f"the problems of {protocol.id} come out differently here (sha256 {found[:12]}..., not"
            f" {protocol.data['sha256'][:12]}...): its generator was changed without a new version"
        )
    return ProblemSet(protocol, problems[:limit], {made.name: found})


def _examples(made: Family, count: int) -> Iterator[Item]:
    yield from draw_distinct(made, count, seed=0, split="train") if count else []


def _generated_problem(protocol: Protocol, item: Item, shots: Sequence[Record]) -> Problem:
    fields = {"prompt": item.prompt, "answer": item.answer}
    plain = _problem(protocol, item.id, fields, shots)
    return Problem(
        plain.id, plain.prompt, plain.prefix, plain.gold, plain.corrupted, plain.record, item
    )
