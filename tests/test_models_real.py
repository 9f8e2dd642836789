"""Models of the field without a hub: their configuration, and tokenizers and processors in their likeness."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import orchestrator
from orchestrator.compose import compose
from orchestrator.config import MediaConfig
from orchestrator.engine.base import Media, Request
from orchestrator.engine.inputs import PromptBuilder
from orchestrator.engine.models.real import RealModel
from orchestrator.engine.placeholders import placeholders
from orchestrator.errors import ConfigError
from orchestrator.model_folder import find_folder
from orchestrator.registry import Registry
from tests.toy import composed

PARAMETERS = {
    "internvl2_5_8b": 8_075_365_376,
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen2_5_vl_7b": 8_292_166_656,
    "llava_onevision_7b": 8_030_348_832,
    "qwen2_audio_7b": 8_397_094_912,
    "opt_125m": 125_239_296,
}
SPECIAL = {
    "internvl2_5_8b": {"<s>": 1, "</s>": 2, "<|im_end|>": 92542, "<IMG_CONTEXT>": 92546},
    "qwen2_5_vl_3b": {
        "<|endoftext|>": 151643,
        "<|im_end|>": 151645,
        "<|vision_start|>": 151652,
        "<|image_pad|>": 151655,
    },
    "llava_onevision_7b": {"<|im_end|>": 151645, "<image>": 151646, "<video>": 151647},
    "qwen2_audio_7b": {"<|im_end|>": 151645, "<|AUDIO|>": 151646, "<|audio_eos|>": 151648},
    "opt_125m": {"<pad>": 1, "</s>": 2},
}
NAMES = sorted(PARAMETERS)


def maker_of(name: str) -> RealModel:
    maker: RealModel = Registry.discover().resolve("models", name)()
    return maker


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> the folder that its maker writes, each written once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            maker_of(name).make(made[name])
        return made[name]

    return folder


def config_of(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)


def processor_of(folder: Path) -> Any:
    auto: Any = transformers.AutoProcessor
    return auto.from_pretrained(folder)


def model_class_of(config: Any) -> Any:
    for name in config.architectures or ():
        return getattr(transformers, name)
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise AssertionError(config.model_type)


def prompts_of(folder: Path, media: MediaConfig) -> PromptBuilder:
    config, processor = config_of(folder), processor_of(folder)
    marks = placeholders(config, processor, model_class_of(config))
    return PromptBuilder(processor, marks.texts, marks.embed_ids, media)


NARROW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "internvl2_5_8b": (
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2},
    ),
    # The three axes of its positions share out a head of 128.
    "qwen2_5_vl_3b": (
        {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
        {"hidden_size": 32, "num_heads": 2, "depth": 2, "out_hidden_size": 256, "fullatt_block_indexes": [1]},
    ),
    "llava_onevision_7b": (
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2},
    ),
    "opt_125m": ({"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64}, {}),
}
"""Changes of the language model and of the encoder."""


def reduced(name: str, folder: Path, target: Path) -> Path:
    """The same folder with two narrow layers; every other setting stays real."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    for part, changes in zip((text, vision), NARROW[name], strict=True):
        part.update(changes)
        if "intermediate_size" in part:
            part["intermediate_size"] = 128
    text["num_hidden_layers"] = 2
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:2]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_parameters(folders: Any, name: str) -> None:
    config = config_of(folders(name))
    with torch.device("meta"):
        model = model_class_of(config)._from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_special_tokens_are_at_their_real_places_and_every_identifier_is_a_text(folders: Any, name: str) -> None:
    processor = processor_of(folders(name))
    tokenizer = getattr(processor, "tokenizer", processor)
    config = config_of(folders(name)).get_text_config()
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[name]} == SPECIAL[name]
    assert len(tokenizer) == config.vocab_size
    assert all(tokenizer.decode([place]) for place in (1000, config.vocab_size // 2, config.vocab_size - 1))
    text = "Größe, 世界\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_text_of_opt_begins_with_the_token_that_the_real_one_begins_with(folders: Any) -> None:
    tokenizer = processor_of(folders("opt_125m"))
    assert tokenizer("hi")["input_ids"] == [2, *tokenizer.convert_tokens_to_ids(["h", "i"])]


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("internvl2_5_8b", (1792, 1344), 3328),
        ("internvl2_5_8b", (448, 448), 256),
        ("qwen2_5_vl_3b", (3584, 3584), 16384),
        ("qwen2_5_vl_7b", (280, 140), 50),
        ("llava_onevision_7b", (384, 384), 1485),
    ],
)
def test_prompts_with_an_image_equal_the_processors_own(
    folders: Any, name: str, size: tuple[int, int], tokens: int
) -> None:
    prompts = prompts_of(folders(name), composed(f"model={name}").mm)
    request = Request("r", "What is this?", (Media("image", Image.new("RGB", size, "green")),))
    ids, items = prompts.prompt(request)
    assert len(items[0].positions) == tokens
    assert ids == prompts.whole(request)["input_ids"][0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_dummy_start_asks_no_hub(name: str, tmp_path: Path) -> None:
    asked = composed(f"model={name}", "model.load_format=dummy").model
    resolve = Registry.discover().resolve
    folder = find_folder(asked, make=lambda wanted: resolve("models", wanted)(), cache_dir=tmp_path)
    assert folder.parent == tmp_path / "models"
    assert config_of(folder).model_type
    assert asked.path == maker_of(name).hub_id


@pytest.mark.parametrize(
    "override", ["model.load_format=auto", "model.revision=v1", "model.path=someone/else", "model.name=other"]
)
def test_the_hub_is_asked_for_what_a_maker_does_not_have(override: str, tmp_path: Path) -> None:
    asked = composed("model=opt_125m", "model.load_format=dummy", override).model
    resolve = Registry.discover().resolve
    with pytest.raises(ConfigError, match="the hub's model could not be fetched"):
        find_folder(asked, make=lambda wanted: resolve("models", wanted)(), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_path_and_with_weights_wanted_the_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(orchestrator.StageError, match=r"holds no safetensors files.*model\.load_format=dummy"):
        orchestrator.start(["model=opt_125m", "model.path=null", "device=cpu", f"run.dir={tmp_path / 'run'}"])


def test_the_record_says_that_the_folder_was_made_here(tmp_path: Path) -> None:
    later = ("dummy_data", "profile_run", "graph_capture", "clear_caches", "allocate_kv", "verify")
    overrides = ["model=opt_125m", "model.load_format=dummy", "device=cpu", f"run.dir={tmp_path / 'run'}"]
    with orchestrator.start([*overrides, *(f"~stages.{slot}" for slot in later)]) as started:
        weights = started.record.stages[0].metrics
    assert (weights["loader"], weights["made_here"], weights["dtype"]) == ("dummy", True, "bfloat16")
    assert weights["parameters"] == PARAMETERS["opt_125m"]


@pytest.mark.parametrize("name", NAMES)
def test_the_limits_are_those_of_a_large_device(name: str) -> None:
    raw = compose([f"model={name}"]).config
    assert raw.scheduler.max_num_seqs == 256
    assert raw.scheduler.max_num_batched_tokens >= 8192
    assert (raw.kv.bytes, raw.model.dtype) == ("auto", "bfloat16")
    assert raw.mm.limit_per_prompt.image == (0 if name in ("opt_125m", "qwen2_audio_7b") else 1)


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("internvl2_5_8b", "null"),
        ("qwen2_5_vl_3b", "[280,280]"),
        ("llava_onevision_7b", "[384,384]"),
        ("opt_125m", "null"),
    ],
)
def test_with_real_settings_and_few_layers_it_starts_and_verifies(
    folders: Any, name: str, largest: str, tmp_path: Path
) -> None:
    folder = reduced(name, folders(name), tmp_path / "reduced")
    overrides = [
        f"model={name}",
        "model.load_format=dummy",
        f"model.path={folder}",
        "model.dtype=float32",
        "device=cpu",
        "kv.bytes=16MiB",
        f"mm.image.max_size={largest}",
        f"scheduler.max_model_len={2048 if name == 'opt_125m' else 3584}",
        "scheduler.max_num_seqs=2",
        "scheduler.max_num_batched_tokens=2048",
        "stages.verify.num_requests=2",
        "stages.verify.max_tokens=4",
        f"run.dir={tmp_path / 'run'}",
    ]
    with orchestrator.start(overrides) as started:
        stages = {stage.slot: stage for stage in started.record.stages}
    assert stages["verify"].status == "ok"
    assert stages["verify"].metrics["images"] == (0 if name == "opt_125m" else 1)
    weights = stages["load_weights"].metrics
    assert (weights["loader"], weights["made_here"]) == ("dummy", False)
