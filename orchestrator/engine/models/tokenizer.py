"""A byte-level tokenizer that needs no vocabulary file, and a chat template: for models that are made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"


def byte_tokenizer(
    special_tokens: Sequence[str],
    *,
    attributes: Mapping[str, str] | None = None,
    max_length: int = 32768,
    first_special_id: int = 256,
) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte: any text has an encoding, and none is shorter than another's rules would say.

    Args:
        special_tokens: beside the three that mark turns and the end of text.
        attributes: attribute of the tokenizer -> special token, for processors that ask for them by name.
        max_length: of a sequence, in tokens.
        first_special_id: the identifier of the first special token, for vocabularies with gaps; at least 256.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    special = [END_OF_TEXT, START_OF_TURN, END_OF_TURN, *special_tokens]
    if first_special_id > len(alphabet):
        vocabulary |= {token: first_special_id + index for index, token in enumerate(special)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    make: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        extra_special_tokens=dict(attributes or {}),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def chat_template(placeholders: Mapping[str, str]) -> str:
    """A Jinja template for messages whose content is a string or a list of parts.

    Args:
        placeholders: type of a part (`image`, `video`, `audio`) -> the text that stands for it in the prompt.
    """
    branches = "".join(
        f"{{%- elif part.type == '{kind}' -%}}{{{{- {text!r} -}}}}" for kind, text in sorted(placeholders.items())
    )
    return (
        "{%- for message in messages -%}"
        f"{{{{- '{START_OF_TURN}' + message.role + '\\n' -}}}}"
        "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
        "{%- for part in message.content -%}"
        "{%- if part.type == 'text' -%}{{- part.text -}}"
        f"{branches}"
        "{%- endif -%}{%- endfor -%}{%- endif -%}"
        f"{{{{- '{END_OF_TURN}\\n' -}}}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{START_OF_TURN}assistant\\n' -}}}}{{%- endif -%}}"
    )


def token_ids(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """The identifiers of special tokens, in their order."""
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in tokens]
