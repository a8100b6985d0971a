"""Published decode loops for Dream-layout models, as plain whole-sequence code.

Oracles for parity tests: Dream's own sampler (arXiv 2508.15487), Fast-dLLM on Dream (arXiv
2505.22618), KLASS on Dream (arXiv 2511.05664) and RND1's sampler, re-implemented from their
published semantics; nothing here uses the toolkit. Dream predicts the next token: every loop
shifts the logits by one, so that row `i` speaks about position `i`.

Letters: `B` rows, `P` prompt, `G` generation, `N = P + G`, `V` vocabulary, `M` masked positions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference.llada import KLHistory, pick_stable
from tests.reference.network import KVCache, Network, Recorder, Trace, canvas_of, crop

Alg = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]


def shifted(logits: Tensor) -> Tensor:
    """Raw logits `(B, Q, V)` moved one row down; the first row stays its own."""
    return torch.cat([logits[:, :1], logits[:, :-1]], dim=1)


def dream_quota(masks: float, step: int, timesteps: Tensor, *, last: bool) -> int:
    """Tokens to commit at a step: `int(masks (1 - s/t))` in float32, everything at the last.

    The truncation is the published behaviour: with as many steps as masks the first step commits
    nothing and the last one commits two.
    """
    if last:
        return int(masks)
    t, s = timesteps[step], timesteps[step + 1]
    return int(masks * (1 - s / t))


def dream_quotas(masks: int, steps: int, eps: float) -> list[int]:
    """`dream_quota` of every step of one run."""
    timesteps = torch.linspace(1, eps, steps + 1)
    counts: list[int] = []
    for step in range(steps):
        left = masks - sum(counts)
        counts.append(dream_quota(left, step, timesteps, last=step == steps - 1))
    return counts


def sample_tokens(
    logits: Tensor,
    alg: Alg,
    *,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Confidence and token of each row of logits `(M, V)`, both `(M,)`.

    Temperature, then nucleus, then top-k; margin and negative entropy are those of the filtered
    distribution and don't depend on the token drawn.
    """
    if temperature > 0:
        logits = logits / temperature
    lowest = torch.finfo(logits.dtype).min
    if top_p is not None and top_p < 1:
        logits = logits.masked_fill(_outside_nucleus(logits, top_p), lowest)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < kth, lowest)
    probs = logits.softmax(-1)
    if temperature > 0:
        tokens = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    else:
        tokens = probs.argmax(-1)
    if alg == "topk_margin":
        top = probs.topk(2).values
        return top[..., 0] - top[..., 1], tokens
    if alg == "entropy":
        return (probs * (probs + 1e-10).log()).sum(-1), tokens
    return probs.gather(-1, tokens[..., None]).squeeze(-1), tokens


def _outside_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """True for tokens after the one that brings the cumulated probability above `top_p`."""
    ranked, order = logits.sort(descending=True)
    before = ranked.softmax(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = 0
    return torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before > top_p)


def on_canvas(values: Tensor, masked: Tensor, fill: float) -> Tensor:
    """Values of the masked positions `(M,)` put at their places `(B, N)`."""
    out = torch.full(masked.shape, fill, dtype=values.dtype, device=values.device)
    out[masked] = values
    return out


# ----------------------------------------------------------------- Dream


def diffusion_generate(
    network: Network,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    steps: int,
    mask_token_id: int,
    alg: Alg = "origin",
    alg_temp: float | None = None,
    temperature: float = 0.0,
    eps: float = 1e-3,
    top_p: float | None = None,
    top_k: int | None = None,
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Trace:
    """Dream's sampler (arXiv 2508.15487) on prompts `(B, P)`, no blocks.

    One count for the whole batch, from the mean number of masks a row, as published.
    """
    x = canvas_of(prompt, max_new_tokens, mask_token_id)
    model = Recorder(network, x)
    if attention_mask is not None:
        attention_mask = F.pad(attention_mask, (0, max_new_tokens), value=1)
    timesteps = torch.linspace(1, eps, steps + 1)
    for step in range(steps):
        masked = x == mask_token_id
        logits = shifted(model(x, attention_mask=attention_mask))[masked]
        confidence, tokens = sample_tokens(
            logits, alg, temperature=temperature, top_p=top_p, top_k=top_k, generator=generator
        )
        last = step == steps - 1
        if alg == "origin":
            rate = 1.0 if last else float(1 - timesteps[step + 1] / timesteps[step])
            draws = torch.rand(tokens.shape, generator=generator).to(x.device)
            chosen = on_canvas(draws < rate, masked, False)
        else:
            mean = float(masked.sum()) / x.shape[0]
            count = dream_quota(mean, step, timesteps, last=last)
            scores = on_canvas(confidence, masked, -torch.inf)
            chosen = _select(scores, count, alg_temp, generator)
        written = on_canvas(tokens, masked, mask_token_id)
        x[chosen] = written[chosen]
    return model.trace()


def _select(
    scores: Tensor, count: int, alg_temp: float | None, generator: torch.Generator | None
) -> Tensor:
    """The `count` best scores of each row, or `count` draws from their softmax."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    if count == 0:
        return chosen
    if alg_temp:
        weights = (scores / alg_temp).softmax(-1)
        order = torch.multinomial(weights, count, generator=generator)
    else:
        order = scores.topk(count).indices
    return chosen.scatter(1, order, True) & scores.isfinite()


# ----------------------------------------------------------------- Fast-dLLM on Dream


def fast_dllm_generate(
    network: Network,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    steps: int,
    mask_token_id: int,
    threshold: float = 0.9,
) -> Trace:
    """Fast-dLLM's confidence threshold on Dream without cache (arXiv 2505.22618), `(1, P)`.

    Each step may commit `masks // steps` tokens plus those that earlier steps could not: the best
    one always, the others if their probability is >= `threshold`. What is left after the last step
    is tried again in extra steps. (alg "entropy" without cache is `diffusion_generate`.)
    """
    x = canvas_of(prompt, max_new_tokens, mask_token_id)
    model = Recorder(network, x)
    budget = max_new_tokens // steps
    step, carried = 0, 0
    while (step < steps or carried) and (x == mask_token_id).any():
        masked = x == mask_token_id
        confidence, tokens = sample_tokens(shifted(model(x))[masked], "maskgit_plus")
        count = min(carried + (budget if step < steps else 0), int(masked.sum()))
        chosen = _best_or_above(on_canvas(confidence, masked, -torch.inf), count, threshold)
        carried = count - int(chosen.sum())
        written = on_canvas(tokens, masked, mask_token_id)
        x[chosen] = written[chosen]
        step += 1
    return model.trace()


def fast_dllm_generate_block(
    network: Network,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    steps: int,
    block_length: int,
    mask_token_id: int,
    dual_cache: bool = False,
    alg: Literal["confidence_threshold", "entropy"] = "entropy",
    threshold: float = 0.9,
    eps: float = 1e-3,
) -> Trace:
    """Fast-dLLM on Dream with prefix or dual cache (arXiv 2505.22618) on one prompt `(1, P)`.

    The refresh of a block always writes the block's first token, whatever its confidence, and
    nothing else: a cached call starts at the block, so its first row has no predecessor. With
    `entropy` the schedule is Dream's over `steps / blocks` steps, the refresh being step 0.
    """
    x = canvas_of(prompt, max_new_tokens, mask_token_id)
    model = Recorder(network, x)
    blocks = max_new_tokens // block_length
    block_steps = steps // blocks
    timesteps = torch.linspace(1, eps, block_steps + 1)
    for block in range(blocks):
        lo = prompt.shape[1] + block * block_length
        hi = lo + block_length
        kv: KVCache = []
        x[:, lo] = shifted(model(x, cache=kv))[:, lo].argmax(-1)
        if not dual_cache:
            kv = crop(kv, lo)
        window = x[:, lo : hi if dual_cache else None]  # a view: commits land in x
        step = 1
        while (x[:, lo:hi] == mask_token_id).any():
            if alg == "entropy" and step == block_steps:
                break
            logits = shifted(model(window, cache=kv, start=lo))
            masked = window == mask_token_id
            masked[:, block_length:] = False
            kind: Alg = "entropy" if alg == "entropy" else "maskgit_plus"
            confidence, tokens = sample_tokens(logits[masked], kind)
            scores = on_canvas(confidence, masked, -torch.inf)
            count = int(masked.sum())
            if alg == "entropy":
                count = dream_quota(count, step, timesteps, last=step == block_steps - 1)
                chosen = _select(scores, count, None, None)
            else:
                chosen = _best_or_above(scores, count, threshold)
            written = on_canvas(tokens, masked, mask_token_id)
            window[chosen] = written[chosen]
            step += 1
    return model.trace()


def _best_or_above(scores: Tensor, count: int, threshold: float) -> Tensor:
    """Bool `(1, N)`: of the `count` best scores the first, and the others if >= threshold."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    ranked, order = scores[0].topk(count)
    for rank in range(count):
        if rank == 0 or ranked[rank] >= threshold:
            chosen[0, order[rank]] = True
    return chosen


# ----------------------------------------------------------------- KLASS on Dream


def klass_generate(
    network: Network,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    steps: int,
    mask_token_id: int,
    conf_threshold: float = 0.9,
    kl_threshold: float = 0.01,
    kl_history_length: int = 2,
    unmask_strategy: Literal["all", "max_conf", "min_kl"] = "all",
) -> Trace:
    """KLASS on Dream (arXiv 2511.05664) on one prompt `(1, P)`, greedy, no blocks.

    Stable: confidence >= `conf_threshold` (LLaDA's file compares with >) and the last
    `kl_history_length` divergences below `kl_threshold`. Without a stable position the single most
    confident one is committed, so that masks are left over when `steps` are too few.
    """
    x = canvas_of(prompt, max_new_tokens, mask_token_id)
    model = Recorder(network, x)
    history = KLHistory(kl_history_length)
    for _ in range(steps):
        masked = x == mask_token_id
        if not masked.any():
            break
        probs = shifted(model(x)).softmax(-1)
        confidence, tokens = probs.max(-1)
        still = history.update(probs) < kl_threshold
        chosen = masked & still & (confidence >= conf_threshold)
        if chosen.any():
            chosen = pick_stable(chosen, confidence, history.last, unmask_strategy)
        else:
            chosen = _select(confidence.masked_fill(~masked, -torch.inf), 1, None, None)
        x[chosen] = tokens[chosen]
    return model.trace()


# ----------------------------------------------------------------- RND1


def rnd1_generate(
    network: Network,
    prompt: Tensor,
    *,
    seq_len: int,
    num_steps: int,
    mask_token_id: int,
    pad_token_id: int,
    eb_gamma: float | None = None,
) -> Trace:
    """RND1's sampler, greedy, on one prompt `(1, P)` and a canvas of `seq_len` positions.

    The last position is kept out of the generation and holds `pad_token_id`. Without `eb_gamma`
    each step commits its even share of what is left, lowest entropy first. With it (EB-Sampler,
    arXiv 2505.24857) positions are ranked by the probability of their token, not by entropy, and
    the longest ranked prefix whose summed entropy minus its largest entropy is <= `eb_gamma` is
    committed, at least one token. The last step commits everything.
    """
    x = canvas_of(prompt, seq_len - prompt.shape[1] - 1, mask_token_id)
    x = F.pad(x, (0, 1), value=pad_token_id)
    model = Recorder(network, x)
    for step in range(num_steps):
        masked = x == mask_token_id
        if not masked.any():
            break
        logits = shifted(model(x))[masked]
        confidence, tokens = sample_tokens(logits, "entropy")
        count = -(-int(masked.sum()) // (num_steps - step))
        if eb_gamma is not None and step < num_steps - 1:
            entropies = -confidence
            confidence, _ = sample_tokens(logits, "maskgit_plus")
            count = entropy_bound_count(confidence, entropies, eb_gamma)
        chosen = _select(on_canvas(confidence, masked, -torch.inf), count, None, None)
        written = on_canvas(tokens, masked, mask_token_id)
        x[chosen] = written[chosen]
    return model.trace()


def entropy_bound_count(scores: Tensor, entropies: Tensor, gamma: float) -> int:
    """Size of the largest prefix, by descending score `(M,)`, with sum - max of entropies <= gamma.

    EB-Sampler's bound (arXiv 2505.24857); at least 1, since the first difference is zero.
    """
    ranked = entropies[scores.argsort(descending=True)]
    excess = ranked.cumsum(0) - ranked.cummax(0).values
    return max(1, int((excess <= gamma).long().cumprod(0).sum()))
