"""The model interface of lm-evaluation-harness 0.4.13 over a `Decoder`.

Needs `pip install 'dlm-decode[eval]'`; `harness_cli` registers it, or give an instance to
`lm_eval.simple_evaluate`. What it takes care of: answers are cut at the first end id, then decoded,
then cut at the earliest stop string; a response cache belongs to one decoder; padded duplicates of
a distributed run are not counted; estimates and draws do not depend on batching or order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, CacheHook
from torch import Tensor

from dlm_decode.api import Decoder, load
from dlm_decode.chat import chat_text, text_ids
from dlm_decode.errors import OptionError
from dlm_decode.eval.code import cut
from dlm_decode.eval.likelihood import MonteCarlo, log_likelihood
from dlm_decode.eval.metrics import costs, speeds
from dlm_decode.ranks import join_group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dlm_decode.types import Request

IDENTITY_KEY = "dlm_decode/decoder"


class DlmDecodeLM(LM):
    """A masked diffusion model as lm-eval asks it.

    `options` are sampler, cache, schedule and drawing options, "threshold:0.9;refresh_every:8".
    `gen_length` None takes each task's `max_gen_toks`. `temperature` None takes each request's.
    `nll` is the definition of log-likelihoods, "llada" or "dream".
    """

    def __init__(
        self,
        pretrained: str | None = None,
        sampler: str = "threshold",
        cache: str = "none",
        schedule: str | None = None,
        options: str = "",
        gen_length: int | None = None,
        block_length: int | None = None,
        eos: str = "none",
        stop_at_eos: bool = True,
        temperature: float | None = None,
        cfg_scale: float = 0.0,
        seed: int = 0,
        add_bos_token: bool = False,
        mc_num: int = 128,
        mc_batch_size: int = 32,
        nll: str = "llada",
        check_greedy: bool = False,
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self._rank, self._world_size = join_group()
        self._settings = {key: value for key, value in locals().items() if _is_setting(key)}
        self.loaded = load(pretrained, dtype=dtype, device=device)
        self._device = self.loaded.model.device
        self._method: dict[str, Any] = {
            "sampler": sampler,
            "cache": cache,
            "options": parse_options(options),
            "cfg_scale": cfg_scale,
            "seed": int(seed),
            "max_batch_size": _batch_size(batch_size),
        } | ({} if schedule is None else {"schedule": schedule})
        self._request: dict[str, Any] = {
            "block_length": block_length,
            "eos": eos,
            "stop_at_eos": stop_at_eos,
        }
        self._gen_length, self._temperature = gen_length, temperature
        self._add_bos, self._check_greedy = add_bos_token, check_greedy
        self._how = MonteCarlo(mc_num, mc_batch_size, nll, int(seed))  # type: ignore[arg-type]
        self._decoders: dict[float | None, Decoder] = {}
        self._rows: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        self._decoder(temperature)  # mistakes show before any task is prepared

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        if self.loaded.tokenizer is None:
            raise OptionError("lm-eval needs a model with a tokenizer, and this one has none")
        return self.loaded.tokenizer

    # --- generation ---

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts in the order of the requests; equal requests are different draws."""
        answers: dict[int, str] = {}
        groups: dict[float | None, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(self._temperature_of(request.args[1]), []).append(place)
        for temperature, places in groups.items():
            answers |= self._generate(self._decoder(temperature), requests, places)
        return [answers[place] for place in range(len(requests))]

    def _generate(
        self, decoder: Decoder, instances: Sequence[Instance], places: Sequence[int]
    ) -> dict[int, str]:
        from dlm_decode.eval.decoding import decode

        answers: dict[int, str] = {}
        seen: Counter[str] = Counter()
        made: list[Request] = []
        for place in places:
            context, settings = instances[place].args
            request = self._made_request(decoder, context, settings, str(place))
            made.append(replace(request, sample=seen[context]))
            seen[context] += 1
        for row in decode(decoder, made, warm_up=False):
            instance = instances[int(row["id"])]
            text = cut(row["text"] or "", _stops(instance.args[1]))
            answers[int(row["id"])] = text
            self.cache_hook.add_partial("generate_until", instance.args, text)
            self._rows.setdefault(_key(instance), row)
        return answers

    def _made_request(
        self, decoder: Decoder, context: str, settings: Mapping[str, Any], identifier: str
    ) -> Request:
        length = self._gen_length or settings.get("max_gen_toks") or 256
        ids = self._encode(context)
        return decoder.request(ids, id=identifier, gen_length=int(length), **self._request)

    def _encode(self, text: str) -> list[int]:
        if self._add_bos and self.tokenizer.bos_token:
            text = str(self.tokenizer.bos_token) + text
        return text_ids(self.tokenizer, text)

    def _temperature_of(self, settings: Mapping[str, Any]) -> float | None:
        if self._temperature is not None or not settings.get("do_sample"):
            return self._temperature
        return float(settings.get("temperature") or 0.0)

    def _decoder(self, temperature: float | None) -> Decoder:
        if temperature not in self._decoders:
            made = Decoder(self.loaded, temperature=temperature, **self._method)
            self._decoders[temperature] = made
        return self._decoders[temperature]

    # --- likelihood ---

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """`(log-likelihood estimate, is greedy)`; the second is False unless `check_greedy`."""
        answers = []
        for request in requests:
            context, target = self.encode_pair(*request.args)
            estimate = log_likelihood(self.loaded.model, context, target, self._how)
            greedy = self._check_greedy and self._is_greedy(context, target)
            answers.append((estimate, greedy))
            self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        raise NotImplementedError(
            "rolling log-likelihoods are not defined for masked diffusion models: choose a task of"
            " type generate_until or loglikelihood"
        )

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both; spaces at the context's end belong to the continuation."""
        bare = context.rstrip()
        whole = self._encode(context + continuation)
        before = self._encode(bare) if bare else []
        if self._how.definition == "dream":
            whole = [*whole, self.loaded.model.info.end_ids[0]]
        if not before and self.loaded.model.info.shift:
            return [self.loaded.model.info.end_ids[0]], whole
        return whole[: len(before)], whole[len(before) :]

    def _is_greedy(self, context: list[int], target: list[int]) -> bool:
        """Whether committing the surest position at a time gives the continuation."""
        decoder = Decoder(self.loaded, sampler="llada", options={"steps": len(target)})
        length = len(target)
        request = decoder.request(
            context, gen_length=length, block_length=length, stop_at_eos=False
        )
        return list(decoder.generate([request])[0].ids) == target

    # --- what lm-eval asks of a model beside answers ---

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text; without a generation prompt the last message is left open."""
        return chat_text(self.tokenizer, chat_history, leave_open=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if chat_template is False:
            return None
        template = self.tokenizer.chat_template
        return template if isinstance(template, str) else None

    @property
    def tokenizer_name(self) -> str:
        return str(self.loaded.path).replace("/", "__")

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Refuse a response cache of another decoder: lm-eval's keys hold the prompt alone."""
        identity = json.dumps(self._settings, sort_keys=True, default=str)
        if cache_hook.dbdict is not None:
            if cache_hook.dbdict.get(IDENTITY_KEY, identity) != identity:
                raise OptionError("this response cache belongs to another decoder: name another")
            cache_hook.dbdict[IDENTITY_KEY] = identity
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """The decoder and what generation cost, merged into the results' "config"."""
        rows = list(self._rows.values())
        figures = {**costs(rows), **speeds(rows), "requests": len(rows)} if rows else {}
        return {"dlm_decode": {**self._settings, **figures}}

    # --- several processes (torchrun) ---

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self._world_size == 1:
            return tensor
        parts = [torch.zeros_like(tensor).reshape(-1) for _ in range(self._world_size)]
        dist.all_gather(parts, tensor.reshape(-1))
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        if self._world_size == 1:
            return [obj]
        parts = [None] * self._world_size if self._rank == dst else None
        dist.gather_object(obj, parts, dst=dst)
        return parts

    def barrier(self) -> None:
        if self._world_size > 1:
            dist.barrier()


def parse_options(text: str) -> dict[str, str]:
    """ "threshold:0.9;cache.refresh_every:8" as a mapping; lm-eval itself splits at "," and "="."""
    pairs = [part.partition(":") for part in text.split(";") if part]
    for key, colon, value in pairs:
        if not colon or not key:
            raise OptionError(f"options must be KEY:VALUE;KEY:VALUE, got {key + value!r}")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _is_setting(name: str) -> bool:
    return name not in ("self", "__class__", "device", "batch_size", "max_batch_size")


def _batch_size(given: int | str) -> int:
    if not str(given).isdecimal() or int(given) < 1:
        raise OptionError(f"batch_size must be a whole number of at least 1, got {given!r}")
    return int(given)


def _stops(settings: Mapping[str, Any]) -> list[str]:
    until = settings.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def _key(instance: Instance) -> tuple[Any, ...]:
    """What a request is, so that a repeated one is not counted twice."""
    return (instance.task_name, instance.doc_id, instance.idx, instance.args[0])
