"""Decode on many devices: a pool of decoders as Ray Data actors (extra `distributed`).

Ray places the actors (GPUs, several nodes), hands out batches, and repeats those of an actor that
died. Every worker makes the requests from the whole list of problems, so that what is asked depends
neither on the number of workers nor on who asks it. A request's row may come twice after a death;
the runner keeps the first.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlm_decode.errors import CapabilityError

if TYPE_CHECKING:
    from dlm_decode.eval.decoding import Asking
    from dlm_decode.eval.problems import Problem
    from dlm_decode.eval.runner import Job

Row = Mapping[str, Any]


class DecodingWorker:
    """One decoder of the pool; called with a batch of problem ids."""

    def __init__(
        self, args: argparse.Namespace, problems: Sequence[Problem], asking: Asking
    ) -> None:
        import torch

        from dlm_decode.arguments import build_decoder, parse_parts
        from dlm_decode.eval.decoding import make_requests

        torch.set_num_threads(args.threads or 1)
        self.trace, self.warm_up = args.trace, args.warm_up
        self.decoder = build_decoder(args, parse_parts(args))
        requests, refused = make_requests(self.decoder, problems, asking)
        self.requests = {request.id: request for request in requests}
        self.refused = dict(refused)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        from dlm_decode.eval.decoding import decode
        from dlm_decode.eval.runner import refused_row

        ids = [str(identifier) for identifier in batch["id"]]
        asked = [self.requests[i] for i in ids if i in self.requests]
        rows = [refused_row(i, self.refused[i]) for i in ids if i in self.refused]
        rows += decode(self.decoder, asked, trace=self.trace, warm_up=self.warm_up)
        self.warm_up = False
        return {"row": [json.dumps(row) for row in rows]}


def decode_in_pool(job: Job, problems: Sequence[Problem]) -> Iterator[Row]:
    """The source of a run with `--workers`: rows in order of completion."""
    ray = _start(job.args)
    args = _worker_arguments(job.args)
    todo = [{"id": problem.id} for problem in problems if problem.id not in job.finished]
    blocks = -(-len(todo) // args.batch_size)
    rows = ray.data.from_items(todo, override_num_blocks=blocks).map_batches(
        DecodingWorker,
        fn_constructor_args=(args, list(problems), job.asking),
        batch_size=args.batch_size,
        compute=ray.data.ActorPoolStrategy(size=min(args.workers, blocks)),
        num_cpus=1,
        num_gpus=args.gpus_per_worker or None,
    )
    for item in rows.iter_rows():
        yield json.loads(item["row"])


def _worker_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """The plain settings; with GPUs, each worker sees those that Ray gave it."""
    plain = {key: value for key, value in vars(args).items() if not callable(value)}
    device = "cuda" if args.gpus_per_worker and args.device is None else args.device
    return argparse.Namespace(**{**plain, "device": device})


def _start(args: argparse.Namespace) -> Any:
    """Ray, connected to the cluster that was named or started on this machine."""
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.data")
    except ImportError:
        raise CapabilityError(
            "--workers needs Ray: pip install 'dlm-decode[distributed]'"
        ) from None
    if not ray.is_initialized():
        here = {"num_cpus": args.workers + 1, "include_dashboard": False}
        ray.init(
            address=args.ray_address,
            log_to_driver=False,
            logging_level=logging.WARNING,
            **({} if args.ray_address else here),
        )
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray
