"""Decode a task's requests with one decoder, and note what each cost by the decoder's own clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dlm_decode.chat import chat_text, text_ids
from dlm_decode.errors import CapabilityError, DlmDecodeError
from dlm_decode.eval.problems import Problem
from dlm_decode.jsonl import result_row

if TYPE_CHECKING:
    from dlm_decode.api import Decoder
    from dlm_decode.types import Frame, Request


@dataclass(frozen=True)
class Asking:
    """How problems become requests: the settings of a run that a protocol gives defaults for."""

    gen_length: int
    block_length: int
    eos: str
    stop_at_eos: bool
    chat: bool


def make_requests(
    decoder: Decoder, problems: Sequence[Problem], asking: Asking
) -> tuple[list[Request], list[tuple[str, str]]]:
    """Requests in order, and `(id, reason)` of the problems that this model cannot be asked.

    Equal prompts draw different tokens by their order among all problems, so a request does not
    depend on what was finished before or on how the work is shared out.
    """
    requests: list[Request] = []
    refused: list[tuple[str, str]] = []
    for problem in problems:
        try:
            requests.append(_request(decoder, problem, asking))
        except DlmDecodeError as error:
            refused.append((problem.id, str(error)))
    seen: Counter[tuple[int, ...]] = Counter()
    for place, request in enumerate(requests):
        content = tuple(request.prompt_ids)
        requests[place] = replace(request, sample=seen[content])
        seen[content] += 1
    return requests, refused


def _request(decoder: Decoder, problem: Problem, asking: Asking) -> Request:
    request = decoder.request(
        encode(decoder, problem, chat=asking.chat),
        id=problem.id,
        gen_length=asking.gen_length,
        block_length=asking.block_length,
        eos=asking.eos,
        stop_at_eos=asking.stop_at_eos,
    )
    decoder.check(request)
    return request


def encode(decoder: Decoder, problem: Problem, *, chat: bool) -> list[int]:
    """Token ids of the whole prompt: one user message if `chat` and the tokenizer has a template,
    else the plain text; then what the answer begins with.
    """
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        raise CapabilityError("evaluation needs a tokenizer, and this model has none")
    text = problem.prompt
    if chat and tokenizer.chat_template:
        text = chat_text(tokenizer, [{"role": "user", "content": text}])
    return text_ids(tokenizer, text + problem.prefix)


class DecodeClock:
    """Seconds that the decoder worked: it runs while a frame is being waited for."""

    def __init__(self) -> None:
        self.worked_s = 0.0
        self.idle_s = 0.0
        self._left: float | None = None

    def timed(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """The frames, with the clock stopped while the consumer holds one."""
        source = iter(frames)
        while True:
            entered = time.perf_counter()
            if self._left is not None:
                self.idle_s += entered - self._left
            frame = next(source, None)
            self._left = time.perf_counter()
            self.worked_s += self._left - entered
            if frame is None:
                return
            yield frame


def decode(
    decoder: Decoder, requests: Sequence[Request], *, trace: bool = False, warm_up: bool = True
) -> Iterator[dict[str, Any]]:
    """A row for each request as it is completed: `result_row` and its times.

    `decode_s` is the decoder's time since the row before, so the sum over rows is all of it;
    `seconds` and `ttfb_s` run from the request's admission, without the consumer's time. With
    `warm_up` the first request is decoded once before, and forgotten.
    """
    if warm_up and requests:
        decoder.generate([requests[0]])
    clock = DecodeClock()
    flights: dict[str, _Flight] = {}
    prompts = {request.id: len(request.prompt_ids) for request in requests}
    charged_s = 0.0
    for frame in clock.timed(decoder.stream(requests)):
        flight = flights.setdefault(frame.id, _Flight(clock.idle_s))
        flight.note(frame, clock.worked_s, requests[0].block_length)
        if frame.result is None:
            continue
        seconds = frame.result.trace.elapsed_s - (clock.idle_s - flight.idle_before_s)
        row = result_row(frame.id, frame.result, trace=trace)
        row["prompt_tokens"] = prompts[frame.id]
        row["seconds"] = round(seconds, 6)
        row["ttfb_s"] = flights.pop(frame.id).first_block(seconds, clock.worked_s)
        row["decode_s"] = round(clock.worked_s - charged_s, 6)
        charged_s = clock.worked_s
        yield row


@dataclass
class _Flight:
    """When a request's first block was finished, on the decoder's clock."""

    idle_before_s: float
    block_done_s: float | None = None

    def note(self, frame: Frame, now_s: float, block_length: int | None) -> None:
        if self.block_done_s is None and not any(frame.masked[:block_length]):
            self.block_done_s = now_s

    def first_block(self, seconds: float, now_s: float) -> float | None:
        if self.block_done_s is None:
            return None
        return round(self.block_done_s - (now_s - seconds), 6)
