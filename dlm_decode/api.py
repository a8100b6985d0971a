"""The Python interface: `load` a model, make a `Decoder`, `generate` or `stream`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dlm_decode.caches import CACHES, CachePolicy
from dlm_decode.chat import chat_text, text_ids
from dlm_decode.compose import chain_classes, create_chain
from dlm_decode.engine import Engine
from dlm_decode.errors import CapabilityError, OptionError, RequestError
from dlm_decode.graphs import graphs_for
from dlm_decode.machine import automatic_dtype, usable_device
from dlm_decode.models import DiffusionLM, ModelInfo, forced
from dlm_decode.models.backbone import compile_layers, prepack_layers
from dlm_decode.models.loading import LoadedModel, bundled_model_path, load_model
from dlm_decode.models.placement import Devices
from dlm_decode.options import Options, unknown_option_message
from dlm_decode.ranks import local_device, model_ranks
from dlm_decode.registry import Registry
from dlm_decode.rows import Row, check_request, make_row
from dlm_decode.samplers import Sampler
from dlm_decode.schedules import SCHEDULES, Schedule
from dlm_decode.storage import Storage
from dlm_decode.types import Draw, Frame, Generation, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Device = str | torch.device

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Request
"""Text, chat messages, token ids, or a ready `Request`."""


def load(
    name_or_path: str | Path | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: Device | Sequence[Device] | Mapping[Device, int] | None = None,
    compile: bool = False,
    prepack: bool = False,
    forcing: int | None = None,
    adapter: str | Path | None = None,
    tensor_parallel: bool = False,
) -> LoadedModel:
    """A model and its tokenizer from a folder or hub id; the bundled tiny model by default.

    `dtype` None keeps the checkpoint's (on the CPU the bundled fp16 model runs in fp32); "auto" is
    that too, but on a CPU bfloat16 where it has it in hardware and else float32. `compile` fuses
    what layers do between attentions, at the cost of a minute in the first forward. `prepack` keeps
    a copy of the weights in the order of the CPU's kernels (fp32), for faster products with few
    tokens; they must not be replaced afterwards. `adapter` is a
    folder with a LoRA adapter in peft's form, merged into the weights (extra `lora`). `forcing` is
    the block length of a checkpoint that was trained on by diffusion forcing (D2F), which its files
    do not tell. The layers go over several devices ("cuda:0,cuda:1" or a list) in proportion to
    their free memory, or as a mapping from devices to numbers of layers says. `tensor_parallel`
    loads this process's part of every layer, see `dlm_decode.tensor_parallel`: all processes
    of torch's process group (torchrun begins it) make the same calls, to the same results. Raises
    `CheckpointError` for a checkpoint that cannot be used, `CapacityError` for too little memory.
    """
    if name_or_path is None:
        name_or_path, dtype = bundled_model_path(), dtype or torch.float32
    if tensor_parallel:
        _check_parallel(device, compile=compile, prepack=prepack, adapter=adapter)
        device = local_device(None if device is None else str(device))
    places = _devices(device)
    first = places if isinstance(places, torch.device) else next(iter(places))
    ranks = model_ranks(first) if tensor_parallel else None

    def read() -> LoadedModel:
        return load_model(name_or_path, dtype=_dtype(dtype, first), device=places, ranks=ranks)

    loaded = read() if ranks is None else ranks.agreed(read)
    if adapter is not None:
        from dlm_decode.models.adapters import merge_adapter

        merge_adapter(loaded.model, adapter)
    if forcing is not None:
        loaded.model.info = forced(loaded.model.info, forcing)
    if compile:
        compile_layers(loaded.model)
    if prepack:
        prepack_layers(loaded.model)
    return loaded


def _check_parallel(device: Any, **others: Any) -> None:
    """Raise `CapabilityError` for what does not go with `tensor_parallel`."""
    several = isinstance(device, (list, tuple, Mapping)) or "," in str(device)
    given = [name for name, value in (("several devices", several), *others.items()) if value]
    if given:
        raise CapabilityError(
            f"tensor_parallel does not go with {' and '.join(given)}: leave one of them out"
        )


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | None:
    if dtype is None:
        return None
    if dtype == "auto":
        return automatic_dtype(device)
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(f"dtype must be a floating-point type such as float32, got {dtype!r}")
    return found


def _devices(
    device: Device | Sequence[Device] | Mapping[Device, int] | None,
) -> Devices:
    """One device, or several, each of which can be used."""
    named = device.split(",") if isinstance(device, str) else device
    if named is None or isinstance(named, torch.device):
        return usable_device(named or "cpu")
    if not isinstance(named, (Sequence, Mapping)) or not named or not all(named):
        raise OptionError(f"device names none: give one or more names, none empty, got {device!r}")
    if isinstance(named, Mapping):
        return {usable_device(name): _checked("device", n, int, low=1) for name, n in named.items()}
    found = [usable_device(name) for name in named]
    return found[0] if len(found) == 1 else found


@dataclass(frozen=True)
class Parts:
    """The four independent choices of a decoder, built."""

    sampler: Sampler
    cache: CachePolicy
    schedule: Schedule
    draw: Draw


class Decoder:
    """Decodes requests with one model, sampler, cache policy and schedule.

    Names or ready objects are accepted; "credit+threshold" is a chain of samplers, outermost first.
    `options` are published option names, given to whichever part has them ("cache.refresh_every"
    or "credit.alpha" name the part). Rows are decoded `max_batch_size` at a
    time; each row's result is the same alone and in any batch.
    """

    def __init__(
        self,
        model: LoadedModel | DiffusionLM,
        sampler: str | Sampler = "threshold",
        cache: str | CachePolicy = "none",
        schedule: str | Schedule | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        draw: Draw | None = None,
        temperature: float | None = None,
        cfg_scale: float = 0.0,
        seed: int = 0,
        max_batch_size: int = 8,
        tokenizer: PreTrainedTokenizerBase | None = None,
        storage: Storage | None = None,
        debug: bool = False,
        graphs: bool = False,
    ) -> None:
        """`graphs` replays turns that come again as CUDA graphs, see `dlm_decode.graphs`. Raises
        `UnknownNameError`, `OptionError` or `CapabilityError` for what does not fit.

        `schedule` None takes the blocks that the model was trained with, see `default_schedule`.
        """
        if isinstance(model, LoadedModel):
            self.model: DiffusionLM = model.model
            self.tokenizer = tokenizer or model.tokenizer
        elif hasattr(model, "info"):
            self.model, self.tokenizer = model, tokenizer
        else:
            raise OptionError(f"model must be a loaded one, as api.load() returns, got {model!r}")
        self.seed = _checked("seed", seed, int, low=-(2**63), high=2**63 - 1)
        given = _named(options or {})
        if temperature is not None:
            given["draw.temperature"] = temperature
        schedule = schedule or default_schedule(self.model.info)
        parts = build_parts(sampler, cache, schedule, given, draw)
        bound = parts.schedule.bound(self.tokenizer, self.model.info.vocab_size)
        self.parts = replace(parts, schedule=bound)
        self.engine = Engine(
            self.model,
            self.parts.sampler,
            self.parts.cache,
            self.parts.schedule,
            self.parts.draw,
            cfg_scale=float(_checked("cfg_scale", cfg_scale, (int, float), low=0, high=10**6)),
            max_batch_size=_checked("max_batch_size", max_batch_size, int, low=1),
            debug=debug,
            storage=storage or Storage(),
            graphs=graphs_for(self.model) if graphs else None,
        )

    def request(self, prompt: Prompt, *, chat: bool = True, **settings: Any) -> Request:
        """A `Request` from text, chat messages or ids; `settings` are its other fields.

        Text becomes one user message when the tokenizer has a chat template (unless `chat` is
        False); ids are taken as they are.
        """
        known = [f.name for f in fields(Request) if f.name != "prompt_ids"]
        for key in settings:
            if key not in known:
                raise RequestError(unknown_option_message(key, known, "a request"))
        if isinstance(prompt, Request):
            return replace(prompt, **settings)
        return Request(self.encode(prompt, chat=chat), **settings)

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """Token ids of text, chat messages or ids."""
        if isinstance(prompt, str):
            messages: list[Mapping[str, str]] = [{"role": "user", "content": prompt}]
            if not prompt.strip():
                raise RequestError("the prompt is empty: give at least one word")
            tokenizer = self._tokenizer("a text prompt")
            if not (chat and tokenizer.chat_template):
                return text_ids(tokenizer, prompt)
        elif len(prompt) and isinstance(prompt[0], Mapping):  # type: ignore[arg-type, index]
            messages = [dict(m) for m in prompt]  # type: ignore[union-attr, arg-type]
        else:
            return list(prompt)  # type: ignore[arg-type]
        return self._chat_ids(messages)

    def check(self, request: Request) -> None:
        """Raise `RequestError` or `CapabilityError` if `request` cannot be decoded."""
        check_request(request, self.model.info)
        if request.stop:
            self._tokenizer("a stop string")

    def generate(self, prompts: Prompt | Iterable[Prompt], **settings: Any) -> list[Generation]:
        """Decode prompts (one or many) and return their results in the same order.

        `settings` are fields of `Request`, the same for all prompts; ready requests take them too.
        """
        requests = self._requests(prompts, settings)
        done: dict[int, Generation] = {}
        for place, _, result in self._run(requests):
            if result is not None:
                done[place] = result
        return [done[i] for i in range(len(requests))]

    def run(self, requests: Iterable[Request]) -> Iterator[Generation]:
        """Decode requests and yield each result the moment it is complete."""
        for _, _, result in self._run(list(requests)):
            if result is not None:
                yield result

    def stream(self, prompts: Prompt | Iterable[Prompt], **settings: Any) -> Iterator[Frame]:
        """Yield every row's canvas after each turn; the last frame of a row holds its result."""
        for _, row, result in self._run(self._requests(prompts, settings)):
            span = slice(row.span.start, row.span.stop)
            yield Frame(
                row.request.id,
                tuple(row.shown[span].tolist()),
                tuple(row.masked[span].tolist()),
                row.turn,
                result,
            )

    def _run(self, requests: list[Request]) -> Iterator[tuple[int, Row, Generation | None]]:
        for request in requests:
            self.check(request)
        requests = _told_apart(requests, self.seed)
        info, schedule = self.model.info, self.parts.schedule
        rows = [make_row(request, info, schedule, self.seed) for request in requests]
        places = {id(row): place for place, row in enumerate(rows)}
        for row, result in self.engine.run(rows):
            yield places[id(row)], row, None if result is None else self._worded(row, result)

    def _worded(self, row: Row, result: Generation) -> Generation:
        """The result with its text: cut at the first end id, decoded, cut at stop strings."""
        if self.tokenizer is None:
            return result
        ids = list(result.ids[: result.tokens])
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        for stop in row.request.stop:
            text = text.split(stop, 1)[0] if stop else text
        return replace(result, text=text)

    def _requests(
        self, prompts: Prompt | Iterable[Prompt], settings: Mapping[str, Any]
    ) -> list[Request]:
        if isinstance(prompts, (str, Request)):
            prompts = [prompts]
        if not isinstance(prompts, Iterable) or isinstance(prompts, (Mapping, bytes)):
            raise RequestError(
                f"prompts must be texts, chats, lists of ids or one, got {prompts!r}"
            )
        listed = list(prompts)
        if listed and not isinstance(listed[0], (str, Request)) and not _is_nested(listed[0]):
            listed = [listed]  # type: ignore[list-item]
        made = [self.request(prompt, **settings) for prompt in listed]  # type: ignore[arg-type]
        return [r if r.id else replace(r, id=str(i)) for i, r in enumerate(made)]

    def _chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        tokenizer = self._tokenizer("a chat prompt")
        if not tokenizer.chat_template:
            raise CapabilityError("this model's tokenizer has no chat template: give plain text")
        return text_ids(tokenizer, chat_text(tokenizer, messages))

    def _tokenizer(self, what: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise CapabilityError(f"{what} needs a tokenizer, and this model has none: give ids")
        return self.tokenizer


def default_schedule(info: ModelInfo) -> str:
    """Blocks counted from position 0 for models trained with those, else from the first hole."""
    return "absolute_aligned" if info.block_origin == "absolute" else "fixed"


def build_parts(
    sampler: str | Sampler,
    cache: str | CachePolicy,
    schedule: str | Schedule,
    options: Mapping[str, Any],
    draw: Draw | None = None,
) -> Parts:
    """Build the four parts, handing each option to the part that has it.

    A key may be prefixed ("sampler.", "cache.", "schedule.", "draw.", or the name of a sampler of
    a chain: "credit.alpha"); it must be when two parts share it. Raises `OptionError` naming the
    nearest key.
    """
    for kind, part in (("sampler", sampler), ("cache", cache), ("schedule", schedule)):
        if not isinstance(part, (str, Options)):
            raise OptionError(f"{kind} must be a name or a ready {kind} object, got {part!r}")
    if not isinstance(draw, Draw | None):
        raise OptionError(f"draw must be a Draw, got {draw!r}")
    chain = chain_classes(sampler)
    others = {"cache": _class_of(CACHES, cache), "schedule": _class_of(SCHEDULES, schedule)}
    classes: dict[str, type[Options]] = {**chain, **others, "draw": Draw}
    known = {name: _option_names(cls) for name, cls in classes.items()}
    sorted_out: dict[str, dict[str, Any]] = {name: {} for name in classes}
    for key, value in options.items():
        owner, name = _owner(key, known, tuple(chain))
        sorted_out[owner][name] = value
    return Parts(
        create_chain(sampler, {name: sorted_out[name] for name in chain}),
        CACHES.create(cache, sorted_out["cache"]),
        SCHEDULES.create(schedule, sorted_out["schedule"]),
        replace(draw or Draw(), **sorted_out["draw"]),
    )


def _class_of(registry: Registry[Any], thing: Any) -> type[Options]:
    return registry.get(thing) if isinstance(thing, str) else type(thing)


def _option_names(cls: type[Options]) -> set[str]:
    return {f.name for f in fields(cls) if "help" in f.metadata}


def _owner(key: str, known: Mapping[str, set[str]], chain: tuple[str, ...]) -> tuple[str, str]:
    """Which part an option belongs to, and its name there. "sampler" is any layer of the chain."""
    part, _, name = key.rpartition(".")
    meant = chain if part == "sampler" else (part,) if part else tuple(known)
    if part and part != "sampler" and part not in known:
        parts = ", ".join(["sampler", *known])
        raise OptionError(f"unknown part {part!r} in option {key!r} (parts: {parts})")
    owners = [p for p in meant if name in known[p]]
    if not owners:
        candidates = set().union(*(known[p] for p in meant))
        raise OptionError(unknown_option_message(name, candidates, part or "this combination"))
    if len(owners) > 1:
        choices = ", ".join(f"{p}.{name}" for p in owners)
        raise OptionError(f"option {name!r} belongs to several parts: write one of {choices}")
    return owners[0], name


def _told_apart(requests: list[Request], seed: int) -> list[Request]:
    """Give equal requests of one call different draws.

    The first of them keeps its `sample`; each further one takes the next number that none has.
    """
    kinds: dict[tuple[Any, ...], int] = {}
    kind = [kinds.setdefault(_content(r, seed), len(kinds)) for r in requests]
    taken = {(k, r.sample) for k, r in zip(kind, requests, strict=True)}
    kept: set[tuple[int, int]] = set()
    least: Counter[int] = Counter()
    apart = []
    for k, request in zip(kind, requests, strict=True):
        sample = request.sample
        if (k, sample) in kept:
            sample = max(sample, least[k])
            while (k, sample) in taken:
                sample += 1
            least[k] = sample
        taken.add((k, sample))
        kept.add((k, sample))
        apart.append(replace(request, sample=sample))
    return apart


def _content(request: Request, seed: int) -> tuple[Any, ...]:
    """All that makes two requests the same, but for their `id` and `sample`."""
    plain = replace(
        request,
        prompt_ids=tuple(request.prompt_ids),
        suffix_ids=tuple(request.suffix_ids),
        frozen=tuple(sorted(request.frozen.items())),  # type: ignore[arg-type]
        stop=tuple(request.stop),
        seed=seed if request.seed is None else request.seed,
        id="",
        sample=0,
    )
    return tuple(getattr(plain, f.name) for f in fields(plain))


def _is_nested(prompt: Any) -> bool:
    """Whether the first element of a list is a prompt itself, not an id or a message."""
    return isinstance(prompt, (list, tuple))


def _checked(name: str, value: Any, kind: Any, *, low: int, high: int | None = None) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind) or value != value:
        raise OptionError(f"{name} must be a number, got {value!r}")
    if value < low:
        raise OptionError(f"{name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise OptionError(f"{name} must be at most {high}, got {value}")
    return value


def _named(options: Any) -> dict[str, Any]:
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise OptionError(f"options must be a mapping from names to values, got {options!r}")
    return dict(options)
