"""The side of a model that turns requests into ids: its processor, and what ends a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from orchestrator.config import Config
from orchestrator.engine.build import Description, first_line
from orchestrator.engine.families import Traits
from orchestrator.engine.inputs import PromptBuilder
from orchestrator.engine.options import apply_options
from orchestrator.engine.placeholders import placeholders, refuse_without
from orchestrator.engine.text import special_ids
from orchestrator.errors import CheckpointError


@dataclass(frozen=True)
class Prompting:
    """Makes prompts; `eos_ids` end a text, and `special_ids` have none."""

    builder: PromptBuilder
    eos_ids: frozenset[int]
    special_ids: frozenset[int]


def read_prompting(folder: Path, what: Description, config: Config, traits: Traits) -> Prompting:
    """Read the processor's files in a model's folder.

    Raises:
        CheckpointError: transformers cannot read the processor, or it does not take what the limits say.
        ConfigError: processor options that do not exist.
    """
    processor = _processor(folder, config)
    for modality, limit in config.mm.limit_per_prompt.model_dump().items():
        if limit:
            refuse_without(modality, what.config, processor, what.model_class)
    marks = placeholders(what.config, processor, what.model_class)
    builder = PromptBuilder(
        processor,
        marks.texts,
        marks.embed_ids,
        config.mm,
        whole_runs=traits.both_ways,
        apart=marks.apart,
        dtype=what.dtype,
    )
    tokenizer = builder.tokenizer
    return Prompting(builder, _eos_ids(folder, what.config, tokenizer), special_ids(tokenizer))


def _processor(folder: Path, config: Config) -> Any:
    try:
        processor: Any = transformers.AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            folder, trust_remote_code=False
        )
    # Of many kinds: its own, those of the tokenizers' library, those of a value of another type.
    except Exception as error:
        raise CheckpointError(f"{folder}: transformers cannot read it: {first_line(error)}") from error
    apply_options(processor, config.mm.processor_kwargs)
    return processor


def _eos_ids(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: the generation settings', else the configuration's, else the tokenizer's."""
    candidates: list[Any] = []
    settings = folder / "generation_config.json"
    if settings.is_file():
        try:
            candidates.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
        # As for the processor.
        except Exception as error:
            raise CheckpointError(f"{settings}: transformers cannot read it: {first_line(error)}") from error
    candidates += [
        getattr(config, "eos_token_id", None),
        getattr(config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    found: Any = next((ids for ids in candidates if ids is not None), [])
    return frozenset(found if isinstance(found, list) else [found])
