"""Finding a model's files, reading their headers, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint import Checkpoint, check, locate
from orchestrator.config import ModelConfig
from orchestrator.errors import CheckpointError, ConfigError, UnknownNameError, UserError
from orchestrator.tensorfile import INDEX_NAME, find_weight_files, read_header

DTYPES = frozenset({"float32", "bfloat16"})
Tensors = dict[str, tuple[str, list[int], int]]
WEIGHTS: Tensors = {"a": ("F32", [2, 3], 24), "b": ("BF16", [4], 8)}


def model_config(path: Path | str | None, **changes: Any) -> ModelConfig:
    fields: dict[str, Any] = dict(
        name="pair",
        path=None if path is None else str(path),
        revision=None,
        dtype="auto",
        load_format="auto",
        trust_remote_code=False,
        profiler="auto",
    )
    return ModelConfig(**{**fields, **changes})


def write_tensors(file: Path, tensors: Tensors) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def write_model(folder: Path, config: dict[str, Any] | None = None, weights: Tensors | None = WEIGHTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    (folder / "tokenizer.json").write_text("{}")
    if weights is not None:
        write_tensors(folder / "model.safetensors", weights)
    return folder


class PairMaker:
    version = 1

    def make(self, folder: Path) -> None:
        write_model(folder)


class SlowMaker(PairMaker):
    def make(self, folder: Path) -> None:
        with (folder.parent / "made.log").open("a") as log:
            log.write("made\n")
        (folder / "config.json").write_text("{")
        time.sleep(0.2)
        write_model(folder)


class BrokenMaker(PairMaker):
    def make(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")


def no_maker(name: str) -> PairMaker:
    raise UnknownNameError("model", name, ["pair"], "model.name")


def find(path: Path | str | None, tmp_path: Path, **changes: Any) -> Checkpoint:
    return locate(model_config(path, **changes), make=no_maker, cache_dir=tmp_path / "cache")


def refused(path: Path, tmp_path: Path, dtypes: frozenset[str] = DTYPES, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(find(path, tmp_path, **changes), model_config(path, **changes), dtypes)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("model.")
    return message


def test_a_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    found = find(folder, tmp_path)
    check(found, model_config(folder), DTYPES)
    assert found.folder == folder
    assert found.weight_files == (folder / "model.safetensors",)
    assert [(entry.name, entry.shape, entry.nbytes) for entry in found.tensors] == [("a", (2, 3), 24), ("b", (4,), 8)]
    assert found.total_bytes == 32
    assert found.dtype == "float32"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "my model #1 (a=b)")
    assert find("~/my model #1 (a=b)", tmp_path).folder.name == "my model #1 (a=b)"


def test_shards_in_the_order_of_the_index(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", weights=None)
    for shard, name in (("two", "a"), ("one", "b")):
        write_tensors(folder / f"{shard}.safetensors", {name: WEIGHTS[name]})
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))
    found = find(folder, tmp_path)
    assert [file.name for file in found.weight_files] == ["two.safetensors", "one.safetensors"]
    assert found.total_bytes == 32


def test_dummy_needs_no_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {"text_config": {"dtype": "bfloat16"}}, weights=None)
    found = find(folder, tmp_path, load_format="dummy")
    check(found, model_config(folder, load_format="dummy"), DTYPES)
    assert found.weight_files == ()
    assert found.total_bytes == 0
    assert found.dtype == "bfloat16"


def test_auto_dtype_is_the_configured_one_before_the_stored_one(tmp_path: Path) -> None:
    assert find(write_model(tmp_path / "m", {"torch_dtype": "float16"}), tmp_path).dtype == "float16"


def test_identity_follows_the_files(tmp_path: Path) -> None:
    first = find(write_model(tmp_path / "m"), tmp_path).identity
    assert find(write_model(tmp_path / "copy"), tmp_path).identity == first
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    changed = find(tmp_path / "m", tmp_path).identity
    assert changed != first
    assert find(write_model(tmp_path / "m", {"x": 1}), tmp_path).identity not in (first, changed)


def test_a_made_model_is_made_once(tmp_path: Path) -> None:
    first = locate(model_config(None), make=lambda _: PairMaker(), cache_dir=tmp_path)
    assert first.folder.parent == tmp_path / "models"
    stamp = (first.folder / "config.json").stat().st_mtime_ns
    assert locate(model_config(None), make=lambda _: PairMaker(), cache_dir=tmp_path) == first
    assert (first.folder / "config.json").stat().st_mtime_ns == stamp


def test_another_version_is_another_folder(tmp_path: Path) -> None:
    class Later(PairMaker):
        version = 2

    Later.__qualname__ = PairMaker.__qualname__
    first = locate(model_config(None), make=lambda _: PairMaker(), cache_dir=tmp_path)
    assert locate(model_config(None), make=lambda _: Later(), cache_dir=tmp_path).folder != first.folder


def _make_slowly(cache_dir: Path) -> str:
    return locate(model_config(None), make=lambda _: SlowMaker(), cache_dir=cache_dir).identity


def test_several_processes_make_it_once_and_see_it_whole(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        identities = pool.map(_make_slowly, [tmp_path] * 4)
    assert len(set(identities)) == 1
    assert (tmp_path / "models" / "made.log").read_text() == "made\n"


def test_a_half_written_model_is_never_seen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No space left") as caught:
        locate(model_config(None), make=lambda _: BrokenMaker(), cache_dir=tmp_path)
    assert str(caught.value).startswith(f"cache.dir={tmp_path}")
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    target = locate(model_config(None), make=lambda _: PairMaker(), cache_dir=tmp_path / "a").folder
    left = tmp_path / "b" / "models" / f".{target.name}.xyz"
    left.mkdir(parents=True)
    locate(model_config(None), make=lambda _: PairMaker(), cache_dir=tmp_path / "b")
    assert not left.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache\.dir=.*pair.*writable"):
        locate(model_config(None), make=lambda _: PairMaker(), cache_dir=tmp_path / "file")


def test_an_unknown_made_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean pair"):
        find(None, tmp_path, name="pear")


def test_no_such_folder_names_the_near_miss(tmp_path: Path) -> None:
    write_model(tmp_path / "internvl2_5_8b")
    with pytest.raises(ConfigError, match=r"model\.path=.*internvl2_5_8.*did you mean internvl2_5_8b\?"):
        find(tmp_path / "internvl2_5_8", tmp_path)
    with pytest.raises(ConfigError, match="org/name"):
        find("/nowhere/at/all", tmp_path)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    with pytest.raises(ConfigError, match="is a file; give its folder"):
        find(folder / "model.safetensors", tmp_path)


def test_a_hub_id_without_a_network(tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_checkpoint as t; from pathlib import Path\n"
        "try: t.find('no-such-org/no-such-model', Path(sys.argv[2]))\n"
        "except t.ConfigError as error: print(error); print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("model.path=no-such-org/no-such-model: ")
    assert "hf download no-such-org/no-such-model" in lines[0]
    assert "model.path=/a/folder" in lines[0]
    assert lines[1] == "False"


def test_a_hub_id_that_is_in_the_local_cache(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = write_model(repo / "snapshots" / ("0" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_checkpoint as t; from pathlib import Path\n"
        "print(t.find('org/name', Path(sys.argv[2])).folder)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(snapshot)


def test_no_config(tmp_path: Path) -> None:
    assert "has no config.json" in refused(tmp_path, tmp_path)


def test_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter" in refused(tmp_path, tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_config_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refused(tmp_path, tmp_path)


@pytest.mark.parametrize("nested", [True, False])
def test_quantised_names_the_method(nested: bool, tmp_path: Path) -> None:
    method = {"quantization_config": {"quant_method": "gptq"}}
    folder = write_model(tmp_path / "m", {"text_config": method} if nested else method)
    assert "quantised with gptq" in refused(folder, tmp_path)
    assert "gptq" in refused(folder, tmp_path, load_format="dummy")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E4M3FNUZ"])
def test_float8_weights_are_quantised_too(dtype: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", weights={"w": (dtype, [4], 4)})
    message = refused(folder, tmp_path)
    assert "'w'" in message
    assert f"{dtype}, a quantised type" in message


def test_pickles_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", weights=None)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    message = refused(folder, tmp_path)
    assert "pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_gguf_only(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    assert "GGUF" in refused(tmp_path, tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert "model.load_format=dummy" in refused(write_model(tmp_path / "m", weights=None), tmp_path)


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", weights=None)
    (folder / INDEX_NAME).write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    write_tensors(folder / "model-1.safetensors", WEIGHTS)
    assert "model-2.safetensors, which is not there" in refused(folder, tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../m.safetensors"}}'])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", weights=None)
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        find_weight_files(folder)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", weights=None)
    for name in ("x", "y"):
        write_tensors(folder / f"{name}.safetensors", WEIGHTS)
    assert INDEX_NAME in refused(folder, tmp_path)


def test_a_file_that_is_cut_off_names_the_first_torn_tensor(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m") / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 10)
    message = refused(tmp_path / "m", tmp_path)
    assert str(file) in message
    assert "'a'" in message


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 20, struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"]
)
def test_not_a_safetensors_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: .*not a safetensors file"):
        read_header(file)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        {"dtype": 32, "shape": [2], "data_offsets": [0, 8]},
        3,
    ],
)
def test_a_header_with_a_wrong_entry(fields: Any, tmp_path: Path) -> None:
    text = json.dumps({"w": fields}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match="wrong entry"):
        read_header(file)


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ([(0, 8), (16, 24)], "the tensor 'b' begins at byte .*, and what is before it ends at"),
        ([(0, 8), (4, 12)], "the tensor 'b' begins at byte"),
        ([(0, 8), (8, 16)], "its last tensor ends at byte .* and the file has"),
    ],
)
def test_bytes_that_no_tensor_or_two_of_them_have(offsets: list[tuple[int, int]], says: str, tmp_path: Path) -> None:
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": ends} for name, ends in zip("ab", offsets, strict=True)
    }
    text = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: not a safetensors file: {says}"):
        read_header(file)


def test_a_tensor_without_elements_takes_no_place(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"b": ("F32", [2], 8), "nothing": ("F32", [0, 4], 0), "a": ("F32", [], 4)})
    assert [(entry.name, entry.nbytes) for entry in read_header(tmp_path / "x")] == [("b", 8), ("nothing", 0), ("a", 4)]


def test_a_tensor_in_two_files_is_named_with_both(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", weights=None)
    for shard in ("one", "two"):
        write_tensors(folder / f"{shard}.safetensors", WEIGHTS)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert f"{folder / 'two.safetensors'}: has the tensor 'a', and one.safetensors has it too" in refused(
        folder, tmp_path
    )


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_its_own_is_not_run(trusted: bool, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "org/repo--modeling_x.XModel"}
    folder = write_model(tmp_path / "m", {"model_type": "internlm2", "auto_map": auto_map})
    message = refused(folder, tmp_path, trust_remote_code=trusted)
    assert "configuration_x.py, modeling_x.py" in message
    assert "model.trust_remote_code" in message


def test_code_beside_a_native_class_is_left_alone(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {"model_type": "phi3", "auto_map": {"AutoConfig": "configuration_phi3.X"}})
    check(find(folder, tmp_path), model_config(folder), DTYPES)


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in refused(folder, tmp_path)


def test_a_missing_processor(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {"vision_config": {}})
    assert "vision" in refused(folder, tmp_path)
    (folder / "processor_config.json").write_text("{}")
    check(find(folder, tmp_path), model_config(folder), DTYPES)


def test_a_dtype_that_the_device_lacks(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", {"dtype": "bfloat16"})
    message = refused(folder, tmp_path, frozenset({"float32", "float16"}))
    assert message.startswith("model.dtype=auto: the device has no bfloat16")
    assert "model.dtype=float16 or model.dtype=float32 would work" in message
    assert "model.dtype=float16:" in refused(folder, tmp_path, dtype="float16")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, orchestrator.checkpoint\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'safetensors', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
