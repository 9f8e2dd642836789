"""Building a transformers model from its configuration, and writing it without a progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging


def made_from(model_class: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model with its architecture's own initial weights."""
    return cast(PreTrainedModel, cast(Any, model_class)._from_config(config, dtype=dtype))


def save_quietly(model: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained`; a model that takes a tenth of a second to write needs no bar."""
    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
