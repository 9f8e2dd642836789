"""A request on its way in, and what became of it on its way out."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from orchestrator.engine.base import Media, Output, Request
from orchestrator.engine.loading import Loaded
from orchestrator.engine.media import RequestError
from orchestrator.engine.sampling import Sampling
from orchestrator.engine.step import OpenRequest
from orchestrator.engine.text import TextStream, stop_strings

_TYPES: dict[str, tuple[Any, str]] = {
    "text": (str, "a string"),
    "max_tokens": (Integral, "a whole number"),
    "temperature": (Real, "a number"),
    "top_p": (Real, "a number"),
}
_ITEM_TYPES: dict[str, tuple[Any, str]] = {"media": (Media, "Media"), "stop_token_ids": (Integral, "token ids")}


def open_request(loaded: Loaded, request: Request, *, streams: bool) -> OpenRequest:
    """Tokens, media and positions of a request; one that cannot be served is finished with its error.

    Args:
        streams: whether its text is wanted while it grows.
    """
    try:
        _refuse_types(request)
        sampling, stop = Sampling.of(request), stop_strings(request)
        ids, items = loaded.prompts.prompt(request)
        axes = loaded.rope_index.axes(ids, items) if loaded.rope_index else None
    except RequestError as error:
        return OpenRequest(
            [], request.max_tokens, finish_reason="error", error=str(error), request_id=request.request_id
        )
    stop_ids = frozenset(request.stop_token_ids)
    if not request.ignore_eos:
        stop_ids |= loaded.prompting.eos_ids
    return OpenRequest(
        ids,
        request.max_tokens,
        items,
        stop_ids,
        axes,
        request_id=request.request_id,
        sampling=sampling,
        text=TextStream(loaded.prompts.tokenizer, loaded.prompting.special_ids, stop) if streams or stop else None,
    )


def _refuse_types(request: Request) -> None:
    """Refuse what would break a step, and so everybody's requests."""
    for name, (kind, what) in _TYPES.items():
        value = getattr(request, name)
        if not isinstance(value, kind):
            raise RequestError(f"{name} is {value!r}: it must be {what}")
    for name, (kind, what) in _ITEM_TYPES.items():
        values = getattr(request, name)
        if not isinstance(values, Collection):
            raise RequestError(f"{name} is of type {type(values).__name__}: it must be a tuple of {what}")
        wrong = [type(value).__name__ for value in values if not isinstance(value, kind)]
        if wrong:
            raise RequestError(f"{name} has one of type {wrong[0]}: it must be a tuple of {what}")
    try:
        request.text.encode()
    except UnicodeEncodeError as error:
        half = request.text[error.start]
        raise RequestError(f"text has {half!r} at place {error.start}: it must have whole characters") from error


def output_of(loaded: Loaded, request: Request, sequence: OpenRequest) -> Output:
    """The output of a finished sequence."""
    if sequence.text is None:
        text = loaded.prompts.tokenizer.decode(sequence.output, skip_special_tokens=True)
    else:
        sequence.text.finish()
        text = sequence.text.text
    return Output(
        request_id=request.request_id,
        prompt_token_ids=sequence.prompt,
        token_ids=sequence.output,
        logprobs=sequence.logprobs,
        text=text,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
    )
