"""The small files of an `internvl_chat` checkpoint as transformers reads them, made without running its code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken

from orchestrator.engine.originals.byte_pairs import byte_pair_tokenizer
from orchestrator.engine.originals.sentencepiece import read
from orchestrator.errors import CheckpointError
from orchestrator.originals.internvl_chat import Conversation, Images, conversation, images, native_config

VERSION = 2
"""Raised whenever what is written changes."""

_IMAGENET: Mapping[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_MARKS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
_VIDEO = "<video>"
"""The prompt's word for a video. The checkpoint has none; the processor replaces it before the model sees a token."""
_MOST_TOKENS = 1 << 62
_NOT_PLAIN = ("auto_map", "chat_template", "processor_class")
_TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json", "added_tokens.json", "special_tokens_map.json")


def write_native(source: Path, folder: Path, config: Mapping[str, Any], *, tied: bool) -> None:
    """Write config.json, tokenizer, processor, chat template and generation settings into an empty folder.

    Args:
        source: the checkpoint.
        config: its config.json.
        tied: whether the output head is the embedding.

    Raises:
        CheckpointError: what cannot be read or is not what InternVL needs.
    """
    settings = _json(source / "tokenizer_config.json")
    added = _added_tokens(source, settings)
    if (source / "tokenizer.model").is_file() and not (source / "vocab.json").is_file():
        tokenizer = _from_sentencepiece(source, settings, added)
    else:
        tokenizer = _from_files(source, folder, settings)
    _refuse_moved(source, tokenizer, added)
    talk = conversation(config)
    _processor(tokenizer, images(config), talk).save_pretrained(folder)
    native = native_config(config, image_token_id=tokenizer.context_image_token_id, tied=tied)
    (folder / "config.json").write_text(json.dumps(native, indent=2) + "\n", encoding="utf-8")
    make: Any = transformers.GenerationConfig
    make(eos_token_id=_eos_ids(source, tokenizer, talk)).save_pretrained(folder)


def _json(path: Path) -> dict[str, Any]:
    """An empty mapping where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}); copy or download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a mapping; copy or download it again")
    return found


def _added_tokens(source: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Identifier -> token, from wherever this tokenizer's version of transformers wrote it."""
    decoder = settings.get("added_tokens_decoder") or {}
    if decoder:
        return {int(place): _token(fields) for place, fields in decoder.items()}
    special = {_text(each) for each in _special_tokens(source, settings)}
    by_name = _json(source / "added_tokens.json")
    return {
        place: AddedToken(name, normalized=False, special=name in special)
        for name, place in sorted(by_name.items(), key=lambda item: item[1])
    }


def _token(fields: Mapping[str, Any]) -> AddedToken:
    flags = {name: fields.get(name, False) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
    return AddedToken(fields["content"], **flags)


def _special_tokens(source: Path, settings: Mapping[str, Any]) -> list[Any]:
    named = {**_json(source / "special_tokens_map.json"), **settings}
    one = [value for name, value in named.items() if name.endswith("_token") and value is not None]
    return [*one, *(named.get("additional_special_tokens") or ())]


def _text(token: Any) -> str | None:
    """A special token is written as text or as a mapping with flags."""
    return token.get("content") if isinstance(token, Mapping) else token if isinstance(token, str) else None


def _from_sentencepiece(source: Path, settings: Mapping[str, Any], added: Mapping[int, AddedToken]) -> Any:
    named = {**_json(source / "special_tokens_map.json"), **settings}
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    special = {name: _text(named.get(name)) or default for name, default in names.items()}
    backend = byte_pair_tokenizer(
        read(source / "tokenizer.model"),
        added,
        before=special["bos_token"] if settings.get("add_bos_token", True) else None,
        after=special["eos_token"] if settings.get("add_eos_token", False) else None,
    )
    make: Any = transformers.PreTrainedTokenizerFast
    return make(
        tokenizer_object=backend,
        **special,
        extra_special_tokens={**_MARKS, "video_token": _VIDEO},
        model_max_length=_max_length(settings),
        clean_up_tokenization_spaces=False,
    )


def _from_files(source: Path, folder: Path, settings: Mapping[str, Any]) -> Any:
    """By transformers' own class; the copies lose what would ask for the checkpoint's code."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    plain = {key: value for key, value in settings.items() if key not in _NOT_PLAIN}
    (folder / "tokenizer_config.json").write_text(json.dumps(plain), encoding="utf-8")
    # Another class than Qwen2's has other rules for what a word is, and tokenizer.json has them.
    of_qwen2 = str(settings.get("tokenizer_class")).startswith("Qwen2") or not (source / "tokenizer.json").is_file()
    kind: Any = transformers.Qwen2Tokenizer if of_qwen2 else transformers.PreTrainedTokenizerFast
    try:
        return kind.from_pretrained(folder, extra_special_tokens={**_MARKS, "video_token": _VIDEO})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: its tokenizer cannot be read ({error})") from error


def _max_length(settings: Mapping[str, Any]) -> int:
    """Where nobody knew, a number stands that is too long for an int of the machine."""
    return min(int(settings.get("model_max_length") or _MOST_TOKENS), _MOST_TOKENS)


def _refuse_moved(source: Path, tokenizer: Any, added: Mapping[int, AddedToken]) -> None:
    """The embedding has a row for each identifier: a token at another place would be another word."""
    for place, token in added.items():
        if (found := tokenizer.convert_tokens_to_ids(token.content)) != place:
            raise CheckpointError(f"{source}: its token '{token.content}' is {place} and was read as {found}")
    known = tokenizer.get_vocab()
    if missing := [mark for mark in _MARKS.values() if mark not in known or known[mark] not in added]:
        raise CheckpointError(f"{source}: its tokenizer has no token {', '.join(missing)}; copy or download it again")


def _processor(tokenizer: Any, pictures: Images, talk: Conversation) -> Any:
    size = {"height": pictures.tile, "width": pictures.tile}
    make: Any = transformers.InternVLProcessor
    return make(
        image_processor=transformers.GotOcr2ImageProcessor(
            size=size,
            crop_to_patches=pictures.cut,
            min_patches=pictures.min_tiles,
            max_patches=pictures.max_tiles,
            **_IMAGENET,
        ),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size=size, **_IMAGENET),
        image_seq_length=pictures.tokens,
        chat_template=_chat_template(talk),
    )


def _chat_template(talk: Conversation) -> str:
    """Messages as the checkpoint's own `chat` writes them, in Jinja; their content is a string or a list of parts."""
    start, end = "'<|im_start|>'", _quoted(talk.end)
    return (
        "{%- if not messages or messages[0].role != 'system' -%}"
        f"{{{{- {start} + 'system\\n' + {_quoted(talk.system)} + {end} -}}}}{{%- endif -%}}"
        "{%- for message in messages -%}"
        f"{{{{- {start} + message.role + '\\n' -}}}}"
        "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
        "{%- for part in message.content -%}"
        "{%- if part.type == 'text' -%}{{- part.text -}}"
        f"{{%- elif part.type == 'image' -%}}{{{{- '{_MARKS['context_image_token']}\\n' -}}}}"
        f"{{%- elif part.type == 'video' -%}}{{{{- '{_VIDEO}\\n' -}}}}"
        "{%- endif -%}{%- endfor -%}{%- endif -%}"
        f"{{{{- {end} -}}}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {start} + 'assistant\\n' -}}}}{{%- endif -%}}"
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def _eos_ids(source: Path, tokenizer: Any, talk: Conversation) -> list[int]:
    """What ends an answer: the end of a message, and what the checkpoint's generation settings name."""
    named = _json(source / "generation_config.json").get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    end = tokenizer.convert_tokens_to_ids(talk.end.strip())
    return list(dict.fromkeys([end, *(each for each in ids if isinstance(each, int))]))
