"""Checkpoints in the layout that OpenGVLab published InternVL in: the same weights, tokens and words."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

import orchestrator
from orchestrator.checkpoint import locate
from orchestrator.engine.models.tokenizer import byte_tokenizer
from orchestrator.engine.originals.byte_pairs import byte_pair_tokenizer
from orchestrator.engine.originals.native import natively
from orchestrator.engine.originals.sentencepiece import read
from orchestrator.errors import CheckpointError
from orchestrator.originals.internvl_chat import native_config
from orchestrator.originals.internvl_tensors import place
from orchestrator.tensorfile import TensorEntry
from tests.gpu.original_layout import CONFIG, config, write
from tests.original_folders import CHINESE, MARKS, ROOT, TURNS, Pair, internlm2_pair, qwen2_pair
from tests.starts import SMALL
from tests.test_checkpoint import model_config
from tests.tiny_models import alone, image, make_engine, request

SIX_BILLION = {"qkv_bias": False, "qk_normalization": True, "norm_type": "rms_norm"}
"""What sets the vision model of the larger sizes apart."""

KINDS: dict[str, Callable[[Path], Pair]] = {
    "internlm2": internlm2_pair,
    "internlm2, large vision": lambda folder: internlm2_pair(folder, vision=SIX_BILLION, bias=True),
    "qwen2": qwen2_pair,
    "qwen2, tied": lambda folder: qwen2_pair(folder, tied=True),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Kind -> a model in both forms, each made once."""
    made: dict[str, Pair] = {}

    def pair(kind: str) -> Pair:
        if kind not in made:
            made[kind] = KINDS[kind](tmp_path_factory.mktemp("originals") / kind.replace(", ", "-"))
        return made[kind]

    return pair


def native_folder(original: Path, cache: Path) -> Path:
    found = locate(model_config(original), make=lambda name: pytest.fail(name), cache_dir=cache)
    return natively(found, cache).described_in


def processor_of(folder: Path) -> Any:
    auto: Any = transformers.AutoProcessor
    return auto.from_pretrained(folder)


def changed(pair: Pair, folder: Path, **changes: Any) -> Path:
    """A folder with the same files but for config.json."""
    folder.mkdir()
    for file in pair.original.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((pair.original / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_tensor_and_every_generated_token_equal_the_native_model(pairs: Any, kind: str) -> None:
    pair = pairs(kind)
    engine = make_engine(pair.original)
    assert engine._loaded is not None
    mine, theirs = engine._loaded.model.state_dict(), pair.model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    asked = [
        request("What is this?", image(1, 120, 60), max_tokens=12, name="picture"),
        request("Say something long, please.", max_tokens=12, name="words"),
    ]
    outputs = engine.generate(asked)
    for output, each in zip(outputs, asked, strict=True):
        prompt = engine._loaded.prompts.text(each)
        assert output.error is None
        assert list(output.token_ids) == alone(pair.model, engine.processor, each, prompt)


@pytest.mark.parametrize("kind", ["internlm2", "qwen2"])
def test_a_whole_start_verifies(pairs: Any, kind: str, tmp_path: Path) -> None:
    overrides = [
        *SMALL,
        "model=auto",
        f"model.path={pairs(kind).original}",
        "kv.bytes=need",
        f"run.dir={tmp_path / 'r'}",
    ]
    with orchestrator.start([*overrides, "scheduler.max_model_len=1024", "stages.verify.max_tokens=4"]) as started:
        stages = {stage.slot: stage for stage in started.record.stages}
    assert stages["verify"].status == "ok"
    assert stages["verify"].metrics["images"] > 0
    assert stages["load_weights"].metrics["files"] == 2


def test_random_weights_need_no_weights_of_the_checkpoint(pairs: Any, tmp_path: Path) -> None:
    folder = changed(pairs("qwen2"), tmp_path / "m")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    engine = make_engine(folder, model={"load_format": "dummy"})
    assert engine.generate([request("x", max_tokens=2)])[0].error is None


def test_ids_are_those_of_the_tokenizers_own_library(pairs: Any, tmp_path: Path) -> None:
    pair = pairs("internlm2")
    tokenizer = processor_of(native_folder(pair.original, tmp_path)).tokenizer
    text = (ROOT / "README.md").read_text() + CHINESE
    draw = random.Random(0)
    cuts = [draw.randrange(len(text)) for _ in range(200)]
    samples = [
        *(text[at : at + draw.randrange(1, 80)] for at in cuts),
        "",
        " ",
        "  two  blanks ",
        "\n\n\t",
        "é 😀 ﬁ \u00a0",
    ]
    for sample in samples:
        ids = pair.sentencepiece.encode(sample)
        assert tokenizer.encode(sample, add_special_tokens=False) == ids, sample
        assert tokenizer.decode(ids) == pair.sentencepiece.decode(ids), sample


def test_a_tokenizer_of_another_class_keeps_its_own_rules(pairs: Any, tmp_path: Path) -> None:
    """As over Llama 3, whose words are others than Qwen2's: digits in threes, characters as they are."""
    folder = changed(pairs("qwen2"), tmp_path / "m")
    for name in ("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json"):
        (folder / name).unlink()
    own = byte_tokenizer([*TURNS, *MARKS]).backend_tokenizer
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), "isolated")
    own.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    own.model = models.BPE({**own.get_vocab(), "12": 600, "123": 601}, [("1", "2"), ("12", "3")])
    own.save(str(folder / "tokenizer.json"))
    places = {str(own.token_to_id(name)): {"content": name, "special": True} for name in (*TURNS, *MARKS)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": places, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mine = processor_of(native_folder(folder, tmp_path)).tokenizer
    for text in ("12345 is a number", "e\u0301t\u00e9", "<|im_start|>12<IMG_CONTEXT>1"):
        assert mine.encode(text) == own.encode(text).ids
    assert mine.encode("1234")[0] == 601


def test_special_tokens_keep_their_places_over_pieces_and_behind_them(pairs: Any, tmp_path: Path) -> None:
    pair = pairs("internlm2")
    tokenizer = processor_of(native_folder(pair.original, tmp_path)).tokenizer
    first = pair.sentencepiece.get_piece_size() - len(TURNS)
    assert tokenizer.convert_tokens_to_ids([*TURNS, *MARKS]) == list(range(first, first + len(TURNS) + len(MARKS)))
    assert tokenizer.encode("<|im_start|>a<img>") == [1, first + 5, *pair.sentencepiece.encode("a"), first + 6]
    assert tokenizer.decode([first + 4, *pair.sentencepiece.encode("so")], skip_special_tokens=True) == "so"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize("leading", [True, False])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_a_model_with_other_rules_for_blanks_and_characters(leading: bool, rule: str, tmp_path: Path) -> None:
    import io

    import sentencepiece

    written = io.BytesIO()
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=leading,
        remove_extra_whitespaces=leading,
        normalization_rule_name=rule,
        minloglevel=2,
    )
    (tmp_path / "m").write_bytes(written.getvalue())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    mine = byte_pair_tokenizer(read(tmp_path / "m"), {})
    for sample in [*lines[:60], "  two  blanks ", "ﬁ \u00a0 x", "é😀"]:
        assert mine.encode(sample).ids == theirs.encode(sample)
        assert mine.decode(theirs.encode(sample)) == theirs.decode(theirs.encode(sample))


def test_the_prompt_is_what_the_published_code_makes(pairs: Any, tmp_path: Path) -> None:
    processor = processor_of(native_folder(pairs("qwen2").original, tmp_path))
    system = (
        "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"  # noqa: RUF001
    )
    picture = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    answer = {"role": "assistant", "content": "A cat."}
    again = {"role": "user", "content": "And it's colour?"}
    text = processor.apply_chat_template([picture, answer, again], add_generation_prompt=True, tokenize=False)
    assert text == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\n<IMG_CONTEXT>\nWhat is this?<|im_end|>\n"
        "<|im_start|>assistant\nA cat.<|im_end|>\n"
        "<|im_start|>user\nAnd it's colour?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    own = processor.apply_chat_template([{"role": "system", "content": "Be brief."}, again], tokenize=False)
    assert own == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAnd it's colour?<|im_end|>\n"


def test_pictures_are_cut_as_the_configuration_says(pairs: Any, tmp_path: Path) -> None:
    folder = changed(pairs("qwen2"), tmp_path / "m", max_dynamic_patch=4)
    processor = processor_of(native_folder(folder, tmp_path))
    made = processor(text=["<IMG_CONTEXT>"], images=[image(0, 224, 56)], return_tensors="pt")
    assert made["pixel_values"].shape == (5, 3, 56, 56)
    ids = processor.tokenizer.convert_ids_to_tokens(made["input_ids"][0])
    assert ids == ["<img>", *["<IMG_CONTEXT>"] * 20, "</img>"]
    plain = changed(pairs("qwen2"), tmp_path / "whole", dynamic_image_size=False)
    tiles = processor_of(native_folder(plain, tmp_path)).image_processor
    assert tiles.crop_to_patches is False


def test_an_answer_ends_with_its_message_and_where_the_checkpoint_says(pairs: Any, tmp_path: Path) -> None:
    pair = pairs("internlm2")
    written = json.loads((native_folder(pair.original, tmp_path) / "generation_config.json").read_text())
    first = pair.sentencepiece.get_piece_size() - len(TURNS)
    assert written["eos_token_id"] == [first + 4, first + 5]
    without = json.loads((native_folder(pairs("qwen2").original, tmp_path) / "generation_config.json").read_text())
    assert without["eos_token_id"] == [258]


def test_the_native_files_are_written_once_and_follow_the_checkpoint(pairs: Any, tmp_path: Path) -> None:
    first = native_folder(pairs("qwen2").original, tmp_path)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert native_folder(pairs("qwen2").original, tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    other = native_folder(changed(pairs("qwen2"), tmp_path / "m", max_dynamic_patch=4), tmp_path)
    assert other != first
    assert not list(first.glob("*.py"))
    assert not list(first.glob("*.safetensors"))


def test_the_configuration_of_the_8b_is_the_one_that_is_known_of_its_converted_form(tmp_path: Path) -> None:
    from orchestrator.engine.models.real import InternVL25

    InternVL25().make(tmp_path)
    known = transformers.AutoConfig.from_pretrained(tmp_path)
    native = transformers.InternVLConfig.from_dict(native_config(CONFIG, image_token_id=92546, tied=False))
    mine, theirs = native.to_dict(), known.to_dict()
    assert mine["dtype"] == theirs["dtype"] == "bfloat16"
    of_one_only = {"architectures", "transformers_version", "dtype", "_name_or_path"}
    for part in ("vision_config", "text_config"):
        a, b = mine.pop(part), theirs.pop(part)
        assert {key: value for key, value in a.items() if b.get(key, value) != value and key not in of_one_only} == {}
    assert {key for key in theirs if mine.get(key) != theirs[key]} <= of_one_only


def test_a_folder_of_the_real_vocabulary_has_its_special_tokens_where_they_are(tmp_path: Path) -> None:
    write(tmp_path / "m", config(small=True))
    native = native_folder(tmp_path / "m", tmp_path)
    tokenizer = processor_of(native).tokenizer
    assert tokenizer.encode("a<img>") == [1, 3 + ord("a"), 92544]
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<IMG_CONTEXT>", "</box>"]) == [92542, 92546, 92552]
    assert json.loads((native / "config.json").read_text())["image_token_id"] == 92546
    assert len(tokenizer.get_vocab()) == 92554  # and the prompt's word for a video


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ps_version": "v1"}, "ps_version=v1, and .* only be started with v2"),
        ({"select_layer": -4}, "select_layer=-4"),
        ({"pad2square": True}, "pad2square=True"),
        ({"use_llm_lora": 16}, "use_llm_lora=16"),
        ({"use_thumbnail": False}, "use_thumbnail=False"),
        ({"template": "phi3-chat"}, "template=phi3-chat, .* internvl2_5, internlm2-chat, Hermes-2"),
        ({"llm_config": {"architectures": ["Qwen3ForCausalLM"]}}, "llm_config.architectures=Qwen3ForCausalLM"),
        ({"llm_config": None}, "has no llm_config"),
        (
            {"llm_config": {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": {"type": "yarn"}}},
            "llm_config.rope_scaling.type=yarn",
        ),
    ],
)
def test_what_the_native_class_cannot_be_is_refused_by_name(
    pairs: Any, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = changed(pairs("qwen2"), tmp_path / "m", **changes)
    with pytest.raises(CheckpointError, match=f"model.path={folder}: .*{says}"):
        locate(model_config(folder), make=lambda name: pytest.fail(name), cache_dir=tmp_path)


def test_heads_that_do_not_fit_the_packed_tensors(pairs: Any, tmp_path: Path) -> None:
    text = json.loads((pairs("internlm2").original / "config.json").read_text())["llm_config"]
    folder = changed(pairs("internlm2"), tmp_path / "m", llm_config={**text, "num_key_value_heads": 1})
    with pytest.raises(CheckpointError, match=r"attention\.wqkv.*(the shape|equal parts)"):
        make_engine(folder)


@pytest.mark.parametrize("shape", [(), (0, 64)])
def test_a_packed_tensor_without_rows(pairs: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    config = json.loads((pairs("internlm2").original / "config.json").read_text())
    entry = TensorEntry("language_model.model.layers.0.attention.wqkv.weight", "F32", shape, tmp_path / "x", 8, 8)
    with pytest.raises(CheckpointError, match=r"attention\.wqkv\.weight' has 0 rows"):
        place([entry], config)


def test_a_token_at_another_place_than_its_embedding(pairs: Any, tmp_path: Path) -> None:
    folder = changed(pairs("qwen2"), tmp_path / "m")
    added = json.loads((folder / "added_tokens.json").read_text())
    (folder / "added_tokens.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps({**added, "<box>": 300}))
    with pytest.raises(CheckpointError, match=r"its token '\S*box>' is \d+ and was read as \d+"):
        native_folder(folder, tmp_path)


def test_a_tokenizer_without_the_words_for_pictures(pairs: Any, tmp_path: Path) -> None:
    folder = changed(pairs("qwen2"), tmp_path / "m")
    added = json.loads((folder / "added_tokens.json").read_text())
    (folder / "added_tokens.json").unlink()
    kept = {name: place for name, place in added.items() if name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    (folder / "added_tokens.json").write_text(json.dumps(kept))
    (folder / "special_tokens_map.json").unlink()
    with pytest.raises(CheckpointError, match="has no token <img>, </img>, <IMG_CONTEXT>"):
        native_folder(folder, tmp_path)


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x0a\xff\xff\xff\xff\x0f", b"\x0b"])
def test_a_file_that_is_no_model_of_byte_pairs(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a SentencePiece model of byte pairs"):
        read(tmp_path / "tokenizer.model")


def test_a_model_that_is_cut_off(pairs: Any, tmp_path: Path) -> None:
    whole = (pairs("internlm2").original / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not a SentencePiece model"):
        read(tmp_path / "tokenizer.model")


def test_one_token_with_two_identifiers(pairs: Any) -> None:
    model = read(pairs("internlm2").original / "tokenizer.model")
    with pytest.raises(CheckpointError, match="the token '</s>' has two identifiers, 2 and 500"):
        byte_pair_tokenizer(model, {500: AddedToken("</s>")})
