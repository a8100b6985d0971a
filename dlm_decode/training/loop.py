"""The training loop: one for both models, resumable, with an exponential moving average of the
weights.

Every batch is a function of the step, so a run that was stopped and resumed is the run that was not
stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.training.data import CausalBatch, DiffusionBatch
from dlm_decode.training.models import TinyTransformer
from dlm_decode.training.optim import Optimizer, schedule


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """How long and how fast. `ema`: decay of the averaged weights, less in the first steps."""

    steps: int
    learning_rate: float = 0.003
    weight_decay: float = 0.01
    warmup: int = 100
    decay: float = 0.4
    clip_norm: float = 1.0
    ema: float = 0.998
    autocast: bool = True
    log_every: int = 50
    evaluate_every: int = 500
    save_every: int = 100


def causal_loss(model: TinyTransformer, batch: CausalBatch) -> Tensor:
    """Mean next-token cross-entropy over the batch's weights."""
    logits = model(batch.ids, positions=batch.positions, mask=batch.mask)[:, :-1]
    weights = batch.weights[:, 1:]
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
    )
    return (losses * weights.flatten()).sum() / weights.sum()


def diffusion_loss(model: TinyTransformer, batch: DiffusionBatch) -> Tensor:
    """Weighted cross-entropy of the masked tokens, a mean over rows."""
    scored = batch.weights > 0
    logits = F.linear(model.hidden_states(batch.noised)[scored], model.head)
    losses = F.cross_entropy(logits.float(), batch.ids[scored], reduction="none")
    return (losses * batch.weights[scored]).sum() / batch.weights.shape[0]


def _prefetched(make_batch: Callable[[int], Any], steps: range) -> Iterator[Any]:
    """The batches of `steps`, each made in a second thread while the one before it is used."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(make_batch, steps.start) if steps else None
        for step in steps:
            assert pending is not None
            batch = pending.result()
            pending = pool.submit(make_batch, step + 1) if step + 1 < steps.stop else None
            yield batch


class Run:
    """A model in training in a folder: `checkpoint.pt` to resume from and `log.jsonl` with the
    curves.
    """

    def __init__(self, model: TinyTransformer, folder: Path, config: LoopConfig) -> None:
        self.model, self.folder, self.config = model, folder, config
        self.optimizer = Optimizer(
            model, learning_rate=config.learning_rate, weight_decay=config.weight_decay
        )
        self.average = {name: p.detach().clone() for name, p in model.state_dict().items()}
        self.step, self.tokens, self.elapsed_s = 0, 0, 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def averaged_model(self) -> TinyTransformer:
        """A copy of the model with the averaged weights."""
        copy = TinyTransformer(self.model.config)
        copy.load_state_dict(self.average)
        return copy.eval()

    def train(
        self,
        make_batch: Callable[[int], Any],
        loss_of: Callable[[TinyTransformer, Any], Tensor],
        evaluate: Callable[[TinyTransformer], Mapping[str, Any]] | None = None,
        *,
        until: int | None = None,
    ) -> list[float]:
        """Train up to step `until` (default: to the end); the losses of the steps taken now."""
        losses: list[float] = []
        end = self.config.steps if until is None else min(until, self.config.steps)
        started, before_s = time.monotonic(), self.elapsed_s
        for batch in _prefetched(make_batch, range(self.step, end)):
            losses.append(self._update(batch, loss_of))
            self.step += 1
            self.tokens += batch.ids.numel()
            self.elapsed_s = before_s + time.monotonic() - started
            if self.step % self.config.log_every == 0:
                recent = losses[-self.config.log_every :]
                self._log(loss=round(sum(recent) / len(recent), 4))
            if evaluate and (
                self.step % self.config.evaluate_every == 0 or self.step == self.config.steps
            ):
                self._log(evaluation=evaluate(self.averaged_model()))
            if self.step % self.config.save_every == 0 or self.step == end:
                self.save()
        return losses

    def _update(self, batch: Any, loss_of: Callable[[TinyTransformer, Any], Tensor]) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.autocast):
            loss = loss_of(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        c = self.config
        self.optimizer.step(schedule(self.step, c.steps, warmup=c.warmup, decay=c.decay))
        decay = min(c.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.average[name].lerp_(p, 1 - decay)
        return float(loss.detach())

    def _log(self, **entry: Any) -> None:
        head = {"step": self.step, "tokens": self.tokens, "elapsed_s": round(self.elapsed_s, 1)}
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({**head, **entry}) + "\n")

    def save(self) -> None:
        """Write the checkpoint; a kill in the middle leaves the last one whole."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
        }
        partial = self.folder / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.folder / "checkpoint.pt")

    def resume(self) -> bool:
        """Go on from the folder's checkpoint; whether there was one."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.elapsed_s = state["step"], state["tokens"], state["elapsed_s"]
        return True
