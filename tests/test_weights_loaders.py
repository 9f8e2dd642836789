"""The other loaders against `from_pretrained`, and what each refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.config import WeightsConfig
from orchestrator.device.cpu import CpuDevice
from orchestrator.engine.weights.base import WeightsLoader
from orchestrator.engine.weights.fastsafetensors import FastSafetensorsLoader
from orchestrator.engine.weights.safetensors import SafetensorsLoader
from orchestrator.engine.weights.transformers import TransformersLoader
from orchestrator.errors import CheckpointError, ConfigError
from orchestrator.loaders import refuse_loader
from tests.gpu.write_checkpoint import write_checkpoint
from tests.starts import command_line
from tests.test_weights import (
    FAMILIES,
    OPTIONS,
    TEXT,
    Counted,
    T,
    _assert_same,
    _checkpoint,
    _logits,
    _on_meta,
    _reference,
    _save,
)

OTHERS = [TransformersLoader, FastSafetensorsLoader]
ALL = [SafetensorsLoader, *OTHERS]


def load(
    loader: type[WeightsLoader], folder: Path, dtype: torch.dtype = torch.float32, options: WeightsConfig = OPTIONS
) -> Any:
    model, progress = _on_meta(folder, dtype), Counted()
    checkpoint = _checkpoint(folder)
    files = loader().load(
        model, checkpoint, device=CpuDevice(), dtype=dtype, seed=0, progress=progress, options=options
    )
    assert files == len(checkpoint.weight_files)
    assert progress.total == checkpoint.total_bytes
    return model


@pytest.mark.parametrize("loader", OTHERS)
@pytest.mark.parametrize("family", ["internvl", "mixtral"])
def test_other_loaders_equal_from_pretrained(loader: type[WeightsLoader], family: str, tmp_path: Path) -> None:
    _save(FAMILIES[family](), tmp_path, max_shard_size="60KB")
    for dtype in (torch.float32, torch.bfloat16):
        model = load(loader, tmp_path, dtype)
        _assert_same(model, _reference(tmp_path, dtype))
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("loader", OTHERS)
def test_other_loaders_keep_what_is_tied(loader: type[WeightsLoader], tmp_path: Path) -> None:
    _save(T.LlamaConfig(**TEXT, tie_word_embeddings=True), tmp_path)
    model = load(loader, tmp_path)
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("loader", ALL)
def test_a_tensor_that_is_missing_is_named(loader: type[WeightsLoader], tmp_path: Path) -> None:
    _save(FAMILIES["llama"](), tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: value for key, value in load_file(file).items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(loader, tmp_path)


@pytest.mark.parametrize("loader", ALL)
def test_a_tensor_of_another_shape_is_named(loader: type[WeightsLoader], tmp_path: Path) -> None:
    _save(FAMILIES["llama"](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(33)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[33\].*\[32\]"):
        load(loader, tmp_path)


@pytest.mark.parametrize("loader", ALL)
def test_a_file_that_is_cut_off_is_named(loader: type[WeightsLoader], tmp_path: Path) -> None:
    _save(FAMILIES["llama"](), tmp_path)
    checkpoint, model = _checkpoint(tmp_path), _on_meta(tmp_path)
    with checkpoint.weight_files[0].open("r+b") as file:
        file.truncate(checkpoint.tensors[-1].end - 8)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        loader().load(
            model, checkpoint, device=CpuDevice(), dtype=torch.float32, seed=0, progress=Counted(), options=OPTIONS
        )


@pytest.mark.parametrize("loader", ALL)
def test_a_loader_of_files_refuses_a_checkpoint_without(loader: type[WeightsLoader], tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"weights\.loader=.*model\.load_format=dummy has none; give auto or dummy"):
        loader().load(
            _on_meta(tmp_path),
            _checkpoint(tmp_path, "dummy"),
            device=CpuDevice(),
            dtype=torch.float32,
            seed=0,
            progress=Counted(),
            options=OPTIONS,
        )


@pytest.mark.parametrize("loader", ["transformers", "fastsafetensors"])
def test_the_layout_of_a_models_authors_is_read_by_one_loader_only(loader: str, tmp_path: Path) -> None:
    refuse_loader("safetensors", files=True, original=tmp_path)
    with pytest.raises(ConfigError, match=f"weights.loader={loader}: does not read the layout of {tmp_path}"):
        refuse_loader(loader, files=True, original=tmp_path)


def test_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(FAMILIES["llama"](), tmp_path)
    monkeypatch.setitem(sys.modules, "fastsafetensors", None)
    with pytest.raises(
        ConfigError, match=r"weights\.loader=fastsafetensors: .*install `fastsafetensors`, or give auto"
    ):
        load(FastSafetensorsLoader, tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("weights.loader=fastsafetensor", "there is no weights loader of that name; did you mean fastsafetensors?"),
        ("engine.name=transformrs", "there is no engine of that name; did you mean transformers?"),
        ("engine.attention=tritn", "there is no attention backend of that name; did you mean triton?"),
        ("weights.io=fast", "must be auto, buffered or direct"),
        ("weights.chunk_bytes=1KiB", "must be at least 64 KiB; or auto"),
        ("weights.threads=0", "must be a whole number above 0, or auto"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_imported(override: str, message: str, tmp_path: Path) -> None:
    output, error = (process := command_line(tmp_path, override)).communicate()
    assert (process.returncode, output) == (2, "")
    assert error == f"error: {override}: {message}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_written_checkpoint_is_whole_and_loads(tmp_path: Path) -> None:
    total = write_checkpoint("opt_125m", tmp_path, dtype=torch.bfloat16, layers=1, threads=2)
    checkpoint = _checkpoint(tmp_path)
    assert checkpoint.total_bytes == total
    model = load(SafetensorsLoader, tmp_path, torch.bfloat16)
    assert torch.isfinite(_logits(model)).all()
    stored = load_file(checkpoint.weight_files[0])
    assert all(torch.equal(value, stored[name]) for name, value in model.named_parameters())
    assert 0.01 < float(model.lm_head.weight.float().std()) < 0.03
