"""A tokenizer from a SentencePiece model of byte pairs, with the special tokens that lie over its pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from orchestrator.engine.originals.sentencepiece import Kind, SentencePiece
from orchestrator.errors import CheckpointError

_BLANK = "\u2581"
"""What stands for a blank in a piece."""


def byte_pair_tokenizer(
    model: SentencePiece, added: Mapping[int, AddedToken], *, before: str | None = None, after: str | None = None
) -> Tokenizer:
    """A tokenizer that encodes as the SentencePiece library does between special tokens.

    Args:
        added: identifier -> the token that has it, whatever piece had it before.
        before, after: special tokens that every text begins and ends with.

    Raises:
        CheckpointError: an added token is a piece at another place.
    """
    vocabulary = _vocabulary(model, added)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(model, vocabulary),
            unk_token=next((piece.text for piece in model.pieces if piece.kind == Kind.UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=model.bytes_for_unknown,
        )
    )
    backend.normalizer = _normalizer(model)
    backend.decoder = _decoder(model)
    own = [
        AddedToken(piece.text, normalized=False, special=False)
        for place, piece in enumerate(model.pieces)
        if piece.kind == Kind.USER_DEFINED and place not in added
    ]
    backend.add_tokens(own)
    backend.add_special_tokens([token for token in added.values() if token.special])
    backend.add_tokens([token for token in added.values() if not token.special])
    if before or after:
        backend.post_processor = _around(vocabulary, before, after)
    return backend


def _vocabulary(model: SentencePiece, added: Mapping[int, AddedToken]) -> dict[str, int]:
    names = {place: piece.text for place, piece in enumerate(model.pieces)}
    names.update({place: token.content for place, token in added.items()})
    vocabulary: dict[str, int] = {}
    for place, name in names.items():
        if vocabulary.setdefault(name, place) != place:
            raise CheckpointError(f"the token '{name}' has two identifiers, {vocabulary[name]} and {place}")
    return vocabulary


def _merges(model: SentencePiece, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the best piece first."""
    normal = [piece for piece in model.pieces if piece.kind == Kind.NORMAL and piece.text in vocabulary]
    known = {piece.text for piece in normal}
    return [
        (piece.text[:cut], piece.text[cut:])
        for piece in sorted(normal, key=lambda piece: -piece.score)
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in known and piece.text[cut:] in known
    ]


def _normalizer(model: SentencePiece) -> Any:
    steps: list[Any] = [normalizers.Precompiled(model.characters)] if model.characters else []
    if model.no_extra_blanks:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.leading_blank:
        steps.append(normalizers.Prepend(_BLANK))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _BLANK)])


def _decoder(model: SentencePiece) -> Any:
    steps: list[Any] = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.leading_blank:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _around(vocabulary: Mapping[str, int], before: str | None, after: str | None) -> Any:
    ends = [token for token in (before, after) if token]
    single = " ".join(filter(None, (before, "$A", after)))
    return processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B" if not after else f"{single} $B {after}",
        special_tokens=[(token, vocabulary[token]) for token in dict.fromkeys(ends)],
    )
