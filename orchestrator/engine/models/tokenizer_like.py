"""Tokenizers in the likeness of real ones: a token a byte, but the real size, special tokens and positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Likeness:
    """What is kept of a real tokenizer.

    Attributes:
        vocab_size: rows of the model's embedding; every identifier below it decodes to something.
        special: special token -> its identifier.
        first_byte_id: the identifier of the first of 256 consecutive byte tokens.
        eos: the token that ends a text.
        pad: the token that fills.
        leading: a token that every encoding begins with, if there is one.
        attributes: attribute of the tokenizer -> special token, for processors that ask for them by name.
        max_length: of a sequence, in tokens.
    """

    vocab_size: int
    special: Mapping[str, int]
    eos: str
    pad: str
    max_length: int
    first_byte_id: int = 0
    leading: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)


def tokenizer_like(real: Likeness) -> PreTrainedTokenizerFast:
    """A tokenizer that needs no vocabulary file. Text becomes more tokens than the real one would make of it."""
    backend = Tokenizer(models.BPE(vocab=_vocabulary(real), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in real.special])
    if real.leading is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{real.leading} $A",
            pair=f"{real.leading} $A $B",
            special_tokens=[(real.leading, real.special[real.leading])],
        )
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        bos_token=real.leading,
        eos_token=real.eos,
        pad_token=real.pad,
        extra_special_tokens=dict(real.attributes),
        model_max_length=real.max_length,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def _vocabulary(real: Likeness) -> dict[str, int]:
    """Bytes, special tokens, and words that no text is encoded to wherever an identifier is left."""
    vocabulary = dict(real.special)
    for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocabulary[symbol] = real.first_byte_id + index
    taken = set(vocabulary.values())
    # The letter that the byte-level alphabet writes for a blank begins each word.
    vocabulary.update({f"\u0120w{index}": index for index in range(real.vocab_size) if index not in taken})
    return vocabulary
