"""LoPA's published loop over D2F's pipeline, as plain code for one prompt.

An oracle for parity tests: arXiv 2512.16229 over arXiv 2508.09192, re-implemented from what the
public code does; nothing here uses the toolkit. Dream predicts the next token: the logits of
position i are those of row i - 1, and of a window's first row those kept when what lies before it
was stored. That a padding token stops the opening of blocks is left out.

Letters: `Q` fed positions, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.golden import Case
from tests.reference.network import KVCache, Network, crop


@dataclass(frozen=True)
class Settings:
    """The published settings; `add`, `activation` and `lowest` are shares."""

    gen_length: int
    block: int
    add: float
    activation: float
    threshold: float
    lookahead: int
    lowest: float
    alpha: float
    full_attention: bool


@dataclass(frozen=True)
class Branch:
    """A version of the row: its ids, its activated blocks, where it looks ahead and how sure."""

    ids: list[int]
    active: frozenset[int]
    creation: float = 1.0
    ahead: int | None = None


@dataclass
class Turn:
    """One set of branches: how many positions each fed, what was then committed."""

    fed: list[int]
    commits: list[tuple[int, int]]


def generate(network: Network, case: Case) -> tuple[list[int], list[Turn]]:
    """The generated ids of a golden case, and the turns taken."""
    given = case["settings"]
    settings = Settings(
        given["max_new_tokens"],
        given["block_size"],
        given["block_add_threshold"],
        given["decoded_token_threshold"],
        given["skip_threshold"],
        given["branching_factor"],
        given["branch_topp"],
        given["selection_conf_alpha"],
        given["use_full_attention"],
    )
    return lopa_generate(network, case["prompt_ids"][0], settings)


def lopa_generate(network: Network, prompt: list[int], s: Settings) -> tuple[list[int], list[Turn]]:
    """The generated ids, and the turns taken."""
    base = Branch(prompt, frozenset({0}))
    branches, turns = [base], []
    cache: KVCache = []
    kept: Tensor | None = None
    stored, done = 0, len(prompt)
    while True:
        branches = [_opened(b, len(prompt), network.mask_id, s) for b in branches]
        row = branches[-1]
        if network.mask_id not in row.ids:
            return row.ids[len(prompt) :], turns
        results = []
        for branch in branches:
            fresh: KVCache = []
            raw = _forward(network, branch.ids, cache, stored, len(prompt), s, fresh)
            last = raw[done - stored - 1] if done > stored else kept
            assert last is not None
            logits = torch.cat([last[None], raw[done - stored :][:-1]])
            results.append((logits, fresh, last))
        scores = [
            _score(b, logits, done, network.mask_id, s)
            for b, (logits, _, _) in zip(branches, results, strict=True)
        ]
        best = max(range(len(branches)), key=lambda i: (scores[i], -i))
        winner, (logits, fresh, last) = branches[best], results[best]
        turn = Turn([len(b.ids) - stored for b in branches], [])
        if done > stored:
            cache = _joined(cache, crop(fresh, done - stored))
            kept, stored = last, done
        filled = _filled(winner, logits, done, len(prompt), network.mask_id, s)
        if winner.ahead is not None:
            turn.commits.append((winner.ahead, winner.ids[winner.ahead]))
        turn.commits += filled
        ids = list(winner.ids)
        for at, token in filled:
            ids[at] = token
        row = Branch(ids, winner.active)
        branches = [*_spawned(row, logits, done, network.mask_id, s), row]
        turns.append(turn)
        while done < len(ids) and network.mask_id not in ids[done : done + s.block]:
            done += s.block


def _share(ids: list[int], block: int, start: int, mask_id: int, s: Settings) -> float:
    """Decided share of a block; block 0 is the prompt."""
    if block == 0:
        return 1.0
    first = start + (block - 1) * s.block
    return 1 - ids[first : first + s.block].count(mask_id) / s.block


def _opened(branch: Branch, start: int, mask_id: int, s: Settings) -> Branch:
    """The branch with the next block, if its own last one is decided far enough."""
    ids = list(branch.ids)
    blocks = (len(ids) - start) // s.block
    if blocks < s.gen_length // s.block and _share(ids, blocks, start, mask_id, s) >= s.add:
        ids += [mask_id] * s.block
        blocks += 1
    active = {b + 1 for b in range(blocks) if _share(ids, b, start, mask_id, s) >= s.activation}
    return replace(branch, ids=ids, active=branch.active | active)


def _forward(
    network: Network,
    ids: list[int],
    cache: KVCache,
    stored: int,
    start: int,
    s: Settings,
    fresh: KVCache,
) -> Tensor:
    """Raw logits `(Q, V)` of what is not stored."""
    seen = None
    if not s.full_attention:
        block = ((torch.arange(len(ids)) - start) // s.block).clamp(min=-1)
        seen = block[None, :] <= block[stored:, None]
    fed = torch.tensor([ids[stored:]])
    held = [(k, v) for k, v in cache] if cache else None
    return network(fed, cache=held, start=stored, seen=seen, fresh=fresh)[0]


def _joined(cache: KVCache, new: KVCache) -> KVCache:
    if not cache:
        return new
    pairs = zip(cache, new, strict=True)
    return [(torch.cat([a[0], b[0]], 1), torch.cat([a[1], b[1]], 1)) for a, b in pairs]


def _score(branch: Branch, logits: Tensor, done: int, mask_id: int, s: Settings) -> float:
    """Mean confidence of the least confident share of a branch's masks, mixed with its token's."""
    masks = [i for i, t in enumerate(branch.ids[done:]) if t == mask_id]
    future = 1.0
    if masks:
        c = logits[masks].softmax(-1).amax(-1).sort().values
        future = c[: max(1, int(len(masks) * s.lowest))].mean().item()
    return s.alpha * branch.creation + (1 - s.alpha) * future


def _filled(
    branch: Branch, logits: Tensor, done: int, start: int, mask_id: int, s: Settings
) -> list[tuple[int, int]]:
    filled: list[tuple[int, int]] = []
    for first in range(done, len(branch.ids), s.block):
        masks = [i for i in range(first, first + s.block) if branch.ids[i] == mask_id]
        if not masks:
            continue
        c, tokens = logits[torch.tensor(masks) - done].softmax(-1).max(-1)
        sure = (c > s.threshold).nonzero()[:, 0].tolist()
        if not sure and 1 + (first - start) // s.block in branch.active:
            sure = [int(c.argmax())]
        filled += [(masks[i], int(tokens[i])) for i in sure]
    return filled


def _spawned(row: Branch, logits: Tensor, done: int, mask_id: int, s: Settings) -> list[Branch]:
    """Lookahead branches by confidence, each with one mask filled."""
    masks = [i for i in range(done, len(row.ids)) if row.ids[i] == mask_id]
    if not masks or s.lookahead < 1:
        return []
    c, tokens = logits[torch.tensor(masks) - done].softmax(-1).max(-1)
    order = sorted(range(len(masks)), key=lambda i: -float(c[i]))[: s.lookahead]
    made = []
    for i in order:
        ids = list(row.ids)
        ids[masks[i]] = int(tokens[i])
        made.append(replace(row, ids=ids, creation=float(c[i]), ahead=masks[i]))
    return made
