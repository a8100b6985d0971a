"""dInfer's parallel decoders (arXiv 2510.08666) over a plain loop, as whole-sequence code.

Threshold, hierarchy and credit (CreditDecoding, arXiv 2510.06133) on one LLaDA prompt. The loop:
while the block has masks, forward the whole canvas and decide on the block's logits. Oracles that
use nothing of the toolkit. Letters: `W` positions of the block, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.network import Network, Recorder, Trace, canvas_of

Decide = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits `(W, V)` and mask `(W,)` to what to commit `(W,)` and tokens `(W,)`."""


def generate(
    network: Network,
    prompt: Tensor,
    new_decoder: Callable[[], Decide],
    *,
    gen_length: int,
    block_length: int,
    mask_id: int,
) -> Trace:
    """dInfer's plain loop on one prompt `(1, P)`; each block gets a new decoder."""
    x = canvas_of(prompt, gen_length, mask_id)
    model = Recorder(network, x)
    for lo in range(prompt.shape[1], x.shape[1], block_length):
        hi = lo + block_length
        decide = new_decoder()
        while (masked := x[0, lo:hi] == mask_id).any():
            chosen, tokens = decide(model(x)[0, lo:hi], masked)
            x[0, lo:hi][chosen] = tokens[chosen]
    return model.trace()


def _confidence(logits: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    confidence, tokens = logits.double().softmax(-1).max(-1)
    return confidence.masked_fill(~masked, -torch.inf), tokens


def _near_best(confidence: Tensor, threshold: float) -> Tensor:
    """At least `threshold`, or within 1e-5 of the best."""
    return confidence >= torch.clamp(confidence.max() - 1e-5, max=threshold)


def threshold_decoder(threshold: float) -> Decide:
    """Commit what is at least `threshold` or within 1e-5 of the best."""

    def decide(logits: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        confidence, tokens = _confidence(logits, masked)
        return masked & _near_best(confidence, threshold), tokens

    return decide


def hierarchy_decoder(threshold: float, low_threshold: float) -> Decide:
    """Commit each run of masks' best if above `low_threshold`, all above `threshold`, the best."""

    def decide(logits: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        confidence, tokens = _confidence(logits, masked)
        chosen = confidence > threshold
        run: list[int] = []
        for at, is_mask in enumerate([*masked.tolist(), False]):
            if is_mask:
                run.append(at)
            elif run:
                best = max(run, key=lambda place: float(confidence[place]))
                chosen[best] |= confidence[best] > low_threshold
                run = []
        chosen[confidence.argmax()] = True
        return masked & chosen, tokens

    return decide


def credit_decoder(
    threshold: float,
    *,
    credit_alpha: float = 0.7,
    boost_gamma: float = 0.2,
    decay_beta: float = 0.8,
) -> Decide:
    """CreditDecoding (arXiv 2510.06133): decayed credit of past winners boosts their logits.

    `C = beta C`, `C[argmax p] += p^gamma` at masked positions, then the threshold rule on
    `softmax(logits + alpha ln(1 + C))`.
    """
    credit: list[Tensor] = []

    def decide(logits: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        confidence, tokens = logits.double().softmax(-1).max(-1)
        old = credit.pop() if credit else torch.zeros_like(logits, dtype=torch.float64)
        gain = confidence.pow(boost_gamma).masked_fill(~masked, 0)
        credit.append((old * decay_beta).scatter_add(-1, tokens[:, None], gain[:, None]))
        fused = logits.double() + credit[0].log1p() * credit_alpha
        confidence, tokens = _confidence(fused, masked)
        return masked & _near_best(confidence, threshold), tokens

    return decide
