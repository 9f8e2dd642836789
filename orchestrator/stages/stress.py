"""The load of `verify.mode=stress`: as much of everything at once as the limits allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.config import Config
from orchestrator.engine.base import Engine, Media, Request

WORD = " a"
TURNS = 20


def largest_media(shapes: Mapping[str, tuple[int, ...]], config: Config) -> tuple[Media, ...]:
    """As many of the costliest items of each modality as one prompt may carry, of noise: no two parts are alike, so
    nothing is cheaper than it looks.

    Args:
        shapes: by modality, (width, height) of an image, (frames, width, height) of a video, (samples,) of a recording.
    """
    limits = config.mm.limit_per_prompt.model_dump()
    makers = {"image": _image, "video": _video, "audio": _audio}
    carried: list[Media] = []
    for modality, shape in shapes.items():
        if modality in makers and (count := limits.get(modality, 0)):
            carried += [Media(modality, makers[modality](shape))] * count
    return tuple(carried)


def _image(shape: tuple[int, ...]) -> Any:
    from PIL import Image

    return Image.effect_noise((shape[0], shape[1]), 64).convert("RGB")


def _video(shape: tuple[int, ...]) -> Any:
    import numpy as np

    frames, width, height = shape
    return np.stack([np.asarray(_image((width, height))) for _ in range(frames)])


def _audio(shape: tuple[int, ...]) -> Any:
    import numpy as np

    return np.random.default_rng(0).standard_normal(shape[0]).astype(np.float32)


def filling_requests(engine: Engine, config: Config, num_blocks: int, carried: tuple[Media, ...]) -> list[Request]:
    """Requests that together take every block of the KV cache, as many as may run at once and then some more: those
    wait until blocks are free again. Every fourth carries the media, as far as they fit.
    Each generates for as long as it takes to prefill all the others, so that all of them are there at once.
    """
    seqs, block_size = config.scheduler.max_num_seqs, config.kv.block_size
    max_tokens = steps_to_prefill(num_blocks * block_size, config)
    longest = engine.max_model_len // block_size
    most = min(seqs, num_blocks)
    shares = [min(longest, num_blocks // most + (number < num_blocks % most)) for number in range(most)]
    requests = []
    for number, blocks in enumerate([*shares, *shares[: max(1, most // 8)]]):
        room = blocks * block_size - max_tokens
        choices = (carried, carried[:1], ()) if number % 4 == 0 else ((),)
        found = (fitted(f"fill-{number}", media, room, max_tokens, engine.prompt_tokens) for media in choices)
        requests.append(next((request for request in found if request is not None), None))
    return [request for request in requests if request is not None]


def steps_to_prefill(num_tokens: int, config: Config) -> int:
    """Steps until so many tokens of prompts are in the cache, while all sequences that are there decode."""
    scheduler = config.scheduler
    per_step = max(1, scheduler.max_num_batched_tokens - scheduler.max_num_seqs)
    return min(num_tokens, -(-num_tokens // per_step)) + 8


def fitted(
    request_id: str, media: tuple[Media, ...], room: int, max_tokens: int, count: Callable[[Request], int]
) -> Request | None:
    """A request whose prompt has at most `room` tokens and comes as near to it as whole words allow; None if even an
    empty text does not fit."""

    def request(words: int) -> Request:
        return Request(request_id, WORD * words, media, max_tokens, ignore_eos=True)

    empty = count(request(0))
    if empty > room:
        return None
    per_word = max(1, (count(request(64)) - empty) // 64)
    words = (room - empty) // per_word
    while words > 0 and count(request(words)) > room:
        words -= 1
    return request(words)


def chat_requests(engine: Engine, max_tokens: int, turns: int = TURNS) -> list[Request]:
    """The prompts of a conversation, each with all that went before; as many of the turns as fit."""
    history, requests = "", []
    for turn in range(turns):
        history += f"Question {turn}: what comes after {turn * turn}? "
        request = Request(f"turn-{turn}", history, (), max_tokens, ignore_eos=True)
        if engine.prompt_tokens(request) + max_tokens > engine.max_model_len:
            break
        requests.append(request)
        history += f"Answer {turn}: {turn * turn + 1}. "
    return requests
