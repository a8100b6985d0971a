"""Published decode loops for LLaDA-layout models, as plain whole-sequence code.

Oracles for parity tests and the baseline of the speed benchmark. LLaDA's own loop (arXiv
2502.09992), Fast-dLLM without and with its two caches (arXiv 2505.22618) and KLASS (arXiv
2511.05664), re-implemented from their published semantics; nothing here uses the toolkit.

Letters: `B` rows, `P` prompt, `G` generation, `N = P + G`, `V` vocabulary, `lo:hi` a block.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.reference.network import KVCache, Network, Recorder, Trace, canvas_of, crop

Remasking = Literal["low_confidence", "random"]


def quotas(masks: int, steps: int) -> list[int]:
    """Tokens to commit at each step: an even split whose remainder goes to the first steps."""
    base, extra = divmod(masks, steps)
    return [base + (step < extra) for step in range(steps)]


def block_quotas(canvas: Tensor, lo: int, hi: int, steps: int, mask_id: int) -> list[list[int]]:
    """`quotas` of each row's masks in `[lo, hi)`: one list of `steps` numbers a row."""
    return [quotas(int(count), steps) for count in (canvas[:, lo:hi] == mask_id).sum(1)]


def choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Tokens `(B, N)`: argmax, with Gumbel noise in float64 (LLaDA's, after arXiv 2409.02908)."""
    if temperature == 0:
        return logits.argmax(-1)
    uniform = torch.rand(logits.shape, dtype=torch.float64, generator=generator).to(logits.device)
    tiny = torch.finfo(torch.float64).tiny
    gumbel = -torch.log(-torch.log(uniform.clamp(min=tiny)))
    return (logits.double() + temperature * gumbel).argmax(-1)


def confidence_of(
    logits: Tensor, tokens: Tensor, remasking: Remasking, generator: torch.Generator | None = None
) -> Tensor:
    """Score `(B, N)` of each chosen token: its probability, or a uniform draw."""
    if remasking == "random":
        return torch.rand(tokens.shape, generator=generator).to(logits.device)
    return logits.softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


# ----------------------------------------------------------------- selection rules, on scores


def select_quota(scores: Tensor, counts: list[int]) -> Tensor:
    """Bool `(B, N)`: the `counts[row]` highest scores of each row. Ineligible scores are -inf."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for row, count in enumerate(counts):
        chosen[row, scores[row].topk(count).indices] = True
    return chosen & scores.isfinite()


def select_threshold(scores: Tensor, threshold: float) -> Tensor:
    """Fast-dLLM's threshold rule: rank 1 always, every further rank whose score is >= threshold."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for row, count in enumerate(scores.isfinite().sum(1).tolist()):
        ranked, order = scores[row].topk(count)
        for rank in range(count):
            if rank == 0 or ranked[rank] >= threshold:
                chosen[row, order[rank]] = True
    return chosen


def select_factor(scores: Tensor, factor: float, *, last_rank_quirk: bool = True) -> Tensor:
    """Fast-dLLM's factor rule (Algorithm 2): the longest run of ranks n with (n+1)(1-c_n) < f.

    Rank 1 is always taken. `last_rank_quirk` reproduces the published loop, which also takes the
    first failing rank if it is the last one; with two masks left both are then always written.
    """
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for row, count in enumerate(scores.isfinite().sum(1).tolist()):
        ranked, order = scores[row].topk(count)
        taken = min(1, count)
        while taken < count and ranked[taken] >= 1 - factor / (taken + 2):
            taken += 1
        if last_rank_quirk and taken == count - 1:
            taken = count
        chosen[row, order[:taken]] = True
    return chosen


# ----------------------------------------------------------------- LLaDA


def official_generate(
    network: Network,
    prompt: Tensor,
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    mask_id: int,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    remasking: Remasking = "low_confidence",
    attention_mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Trace:
    """LLaDA's sampler with low-confidence remasking (arXiv 2502.09992) on prompts `(B, P)`.

    Always runs all steps: with fewer tokens than steps the last ones write nothing.
    """
    x = canvas_of(prompt, gen_length, mask_id)
    model = Recorder(network, x)
    given = x != mask_id
    if attention_mask is not None:
        attention_mask = F.pad(attention_mask, (0, gen_length), value=1)
    blocks = gen_length // block_length
    for block in range(blocks):
        lo = prompt.shape[1] + block * block_length
        hi = lo + block_length
        counts = block_quotas(x, lo, hi, steps // blocks, mask_id)
        for step in range(steps // blocks):
            eligible = x == mask_id
            eligible[:, hi:] = False
            logits = _guided(model, x, given, mask_id, cfg_scale, attention_mask)
            tokens = choose(logits, temperature, generator)
            scores = confidence_of(logits, tokens, remasking, generator)
            scores = scores.masked_fill(~eligible, -torch.inf)
            chosen = select_quota(scores, [row[step] for row in counts])
            x[chosen] = tokens[chosen]
    return model.trace()


def _guided(
    model: Recorder,
    x: Tensor,
    given: Tensor,
    mask_id: int,
    cfg_scale: float,
    attention_mask: Tensor | None,
) -> Tensor:
    """Logits, with classifier-free guidance against the canvas without its prompt."""
    if cfg_scale == 0:
        return model(x, attention_mask=attention_mask)
    both = torch.cat([x, x.masked_fill(given, mask_id)])
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(2, 1)
    with_prompt, without = model(both, attention_mask=attention_mask).chunk(2)
    return without + (cfg_scale + 1) * (with_prompt - without)


# ----------------------------------------------------------------- Fast-dLLM


def fast_dllm_generate(
    network: Network,
    prompt: Tensor,
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    mask_id: int,
    cache: Literal["none", "prefix", "dual"] = "none",
    threshold: float | None = None,
    factor: float | None = None,
    last_rank_quirk: bool = True,
    idle_forward_quirk: bool = False,
    temperature: float = 0.0,
    remasking: Remasking = "low_confidence",
    generator: torch.Generator | None = None,
) -> Trace:
    """Fast-dLLM (arXiv 2505.22618) on one prompt `(1, P)`: a block ends when it has no masks.

    With a cache each block starts with a refresh of the whole sequence whose logits also decide
    the block's first commits; `prefix` then recomputes `[lo, N)` over K/V of `[0, lo)`, `dual`
    recomputes the block over K/V of everything else. `idle_forward_quirk` reproduces the first
    published loop: after a refresh one cached forward is made even if the block is already full.

    The cost structure is the published one on purpose, as the benchmark's baseline: head and
    float64 softmax over every fed position (the whole sequence at a refresh), a Python loop over
    candidates, every position of the window recomputed, all keys rotated at each call.
    """
    x = canvas_of(prompt, gen_length, mask_id)
    model = Recorder(network, x)
    blocks = gen_length // block_length
    rule = _Rule(threshold, factor, last_rank_quirk, temperature, remasking, generator)
    for block in range(blocks):
        lo = prompt.shape[1] + block * block_length
        hi = lo + block_length
        rule.counts = block_quotas(x, lo, hi, steps // blocks, mask_id)
        kv: KVCache = []
        logits = model(x, cache=None if cache == "none" else kv)
        rule.commit(logits, x, x == mask_id, hi, step=0)
        if cache == "prefix":
            kv = crop(kv, lo)
        first = {"none": 0, "prefix": lo, "dual": lo}[cache]
        window = x[:, first : hi if cache == "dual" else None]  # a view: commits land in x
        step = 1
        forced = idle_forward_quirk and cache != "none"
        while forced or (x[:, lo:hi] == mask_id).any():
            forced = False
            logits = model(window, cache=kv or None, start=first)
            rule.commit(logits, window, window == mask_id, hi - first, step)
            step += 1
    return model.trace()


class _Rule:
    """One Fast-dLLM commit: float64 confidences of the fed positions, then the chosen rule."""

    counts: list[list[int]]

    def __init__(
        self,
        threshold: float | None,
        factor: float | None,
        last_rank_quirk: bool,
        temperature: float,
        remasking: Remasking,
        generator: torch.Generator | None,
    ) -> None:
        self.threshold, self.factor, self.last_rank_quirk = threshold, factor, last_rank_quirk
        self.temperature, self.remasking, self.generator = temperature, remasking, generator

    def commit(self, logits: Tensor, window: Tensor, masked: Tensor, end: int, step: int) -> None:
        """Writes into `window` `(B, Q)`; positions from `end` on are not eligible."""
        masked[:, end:] = False
        tokens = choose(logits, self.temperature, self.generator)
        scores = confidence_of(logits.double(), tokens, self.remasking, self.generator)
        scores = scores.masked_fill(~masked, -torch.inf)
        if self.threshold is not None:
            chosen = select_threshold(scores, self.threshold)
        elif self.factor is not None:
            chosen = select_factor(scores, self.factor, last_rank_quirk=self.last_rank_quirk)
        else:
            chosen = select_quota(scores, [row[step] for row in self.counts])
        window[chosen] = tokens[chosen]


# ----------------------------------------------------------------- KLASS


def klass_generate(
    network: Network,
    prompt: Tensor,
    *,
    steps: int,
    gen_length: int,
    block_length: int,
    mask_id: int,
    conf_threshold: float = 0.9,
    kl_threshold: float = 0.01,
    kl_history_length: int = 2,
    alg: Literal["klass", "default", "topk_margin"] = "klass",
    unmask_strategy: Literal["all", "max_conf", "min_kl"] = "all",
) -> Trace:
    """KLASS (arXiv 2511.05664) on one prompt `(1, P)`, greedy.

    A position is stable if its confidence is above `conf_threshold` and its last
    `kl_history_length` values of KL(p_t || p_{t-1}) are all below `kl_threshold`. All stable
    positions of the block are committed, or one of them, or, without any, the step's quota by
    confidence. A new block starts a new history, but p_{t-1} of the whole canvas is kept: the
    first divergence of a later block compares with the last step of the block before it.
    """
    x = canvas_of(prompt, gen_length, mask_id)
    model = Recorder(network, x)
    history = KLHistory(kl_history_length)
    blocks = gen_length // block_length
    for block in range(blocks):
        lo = prompt.shape[1] + block * block_length
        hi = lo + block_length
        counts = block_quotas(x, lo, hi, steps // blocks, mask_id)
        history.values = []
        for step in range(steps // blocks):
            eligible = x == mask_id
            eligible[:, :lo] = False
            eligible[:, hi:] = False
            if not eligible.any():
                break
            probs = model(x).double().softmax(-1)
            confidence, tokens = probs.max(-1)
            if alg == "topk_margin":
                confidence = _margin(probs)
            scores = confidence.masked_fill(~eligible, -torch.inf)
            stable = torch.zeros_like(eligible)
            if alg == "klass":
                still = history.update(probs) < kl_threshold
                stable = eligible & still & (confidence > conf_threshold)
            if stable.any():
                chosen = pick_stable(stable, confidence, history.last, unmask_strategy)
            else:
                chosen = select_quota(scores, [row[step] for row in counts])
            x[chosen] = tokens[chosen]
    return model.trace()


class KLHistory:
    """The last `length` values of KL(p_t || p_{t-1}) at each position of a canvas `(B, N)`.

    As published p_{-1} is all zeros, so that the first value is large; values not seen yet count
    as infinite, which comes to the same.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.values: list[Tensor] = []
        self.previous: Tensor | None = None

    @property
    def last(self) -> Tensor:
        return self.values[-1]

    def update(self, probs: Tensor) -> Tensor:
        """Adds the step's distributions `(B, N, V)`; returns the largest kept value `(B, N)`."""
        previous = torch.zeros_like(probs) if self.previous is None else self.previous
        ratio = (probs + 1e-12).log() - (previous + 1e-12).log()
        self.previous = probs
        self.values = [*self.values, (probs * ratio).sum(-1)][-self.length :]
        if len(self.values) < self.length:
            return torch.full(probs.shape[:2], torch.inf, device=probs.device)
        return torch.stack(self.values).amax(0)


def pick_stable(stable: Tensor, confidence: Tensor, divergence: Tensor, strategy: str) -> Tensor:
    """KLASS's unmask strategies on the stable positions `(B, N)`: all, or one a row."""
    if strategy == "all":
        return stable
    ranking = confidence if strategy == "max_conf" else -divergence
    best = ranking.masked_fill(~stable, -torch.inf).argmax(-1, keepdim=True)
    return torch.zeros_like(stable).scatter(1, best, True) & stable


def _margin(probs: Tensor) -> Tensor:
    top = probs.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]
