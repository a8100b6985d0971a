"""Benchmark data from a local folder or the hub, with the sha256 of what was read."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_decode.errors import CapabilityError, DlmDecodeError
from dlm_decode.eval.protocols import Protocol

ENVIRONMENT = "DLM_DATA"
HUB = "hub"

Record = Mapping[str, Any]


class DataError(DlmDecodeError, ValueError):
    """Benchmark data that are missing or not what the protocol pins."""


@dataclass(frozen=True)
class Data:
    """Records by split, and what they were read from: file name (or hub name) to sha256."""

    splits: Mapping[str, Sequence[Record]]
    sha256: Mapping[str, str]


def read_data(protocol: Protocol, location: str | None, *, any_version: bool = False) -> Data:
    """The protocol's data from folder `location`, or "hub"; None takes the folder in DLM_DATA.

    Raises `DataError` for files that are not there or differ from the pinned ones, unless
    `any_version`.
    """
    if location == HUB:
        return _from_hub(protocol)
    folder = location or os.environ.get(ENVIRONMENT)
    if not folder:
        files = ", ".join(protocol.data["files"].values())
        raise DataError(
            f"task {protocol.name} needs {files}: name their folder with --data (or in"
            f" {ENVIRONMENT}), or give --data hub"
        )
    splits, digests = {}, {}
    for split, name in protocol.data["files"].items():
        content = _read_file(Path(folder) / name)
        digests[name] = hashlib.sha256(content).hexdigest()
        if digests[name] != protocol.data["sha256"][name] and not any_version:
            raise DataError(
                f"{name} differs from the file that {protocol.id} pins (sha256"
                f" {digests[name][:12]}..., not {protocol.data['sha256'][name][:12]}...): get that"
                " one, or add --any-data-version"
            )
        splits[split] = _records(name, content)
    return Data(splits, digests)


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"{path} is not there: name the folder that holds it with --data")
    return path.read_bytes()


def _records(name: str, content: bytes) -> list[Record]:
    try:
        if name.endswith(".json"):
            records = json.loads(content)
        else:
            records = [json.loads(line) for line in content.splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"{name} is not valid JSON: {error}") from None
    return list(records)


def _from_hub(protocol: Protocol) -> Data:
    """Through `datasets`; the digest is of the records, since the hub's files are others."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise CapabilityError(
            "--data hub needs the datasets package: pip install 'dlm-decode[eval]'"
        ) from None
    hub = protocol.data["hub"]
    splits, digests = {}, {}
    for split, name in hub["splits"].items():
        try:
            loaded = datasets.load_dataset(hub["path"], hub["config"], split=name)
        except Exception as error:
            raise DataError(f"{hub['path']} cannot be had from the hub: {error}") from None
        splits[split] = [dict(record) for record in loaded]
        digests[f"{hub['path']}:{name}"] = digest(splits[split])
    return Data(splits, digests)


def digest(value: Any) -> str:
    """sha256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
