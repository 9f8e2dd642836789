"""Checkpoints through the command line: folders that start, folders that are refused, and secrets that stay out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from orchestrator import Request, start
from orchestrator.__main__ import main
from orchestrator.records import FILE_NAME, redact
from orchestrator.tensorfile import INDEX_NAME
from tests.starts import FEW_TOKENS, SMALL, own, run_folders

WEIGHTS = "model.safetensors"


def copy_of(model: Path, folder: Path, *, weights: bool = True) -> Path:
    """A model folder of the test's own, with weights or without."""
    return Path(shutil.copytree(model, folder, ignore=None if weights else shutil.ignore_patterns(WEIGHTS)))


def shard(folder: Path) -> None:
    """Split the weights into two files and an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    places = {name: f"part-{1 + index % 2}.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / WEIGHTS).unlink()


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def quantise(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "awq"})


def pickle_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1000])


def need_code(folder: Path) -> None:
    change_config(folder, model_type="own_kind", auto_map={"AutoModel": "modeling_own.Own"})


def exotic_dtype(folder: Path) -> None:
    change_config(folder, dtype="float64")


def let_nobody_read(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    # What the first byte of cannot be read, whoever asks.
    (folder / WEIGHTS).symlink_to("/proc/self/mem")


def empty(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (quantise, "is quantised with awq"),
        (pickle_weights, "only as pickles (pytorch_model.bin)"),
        (cut_off, WEIGHTS),
        (need_code, "needs code of its own (modeling_own.py)"),
        (exotic_dtype, "has no float64"),
        (empty, "holds no safetensors files"),
        (let_nobody_read, "cannot be read (Input/output error); let this user read it"),
    ],
)
def test_what_cannot_start_is_refused_before_anything_is_made(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    named: str,
) -> None:
    folder = copy_of(tiny_folder, tmp_path / "model")
    spoil(folder)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    code = main(["model=auto", f"model.path={folder}", f"cache.dir={work / 'cache'}", own("last", "Note")])
    out, errors = capsys.readouterr()
    assert (code, out) == (2, ""), errors
    assert errors.startswith("error: model.")
    assert named in errors
    assert "Traceback" not in errors
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("loader", ["safetensors", "transformers", "fastsafetensors"])
def test_a_loader_of_files_without_files_is_refused_before_anything_is_made(
    loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([f"weights.loader={loader}", "model.load_format=dummy"]) == 2
    assert capsys.readouterr().err == (
        f"error: weights.loader={loader}: reads files, and model.load_format=dummy has none; give auto or dummy\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_needs_what_nobody_provides_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([own("last", "Needy")]) == 2
    assert "stages.last (tests.planted:Needy) needs 'nothing', and nothing before it" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_sharded_folder_with_an_awkward_name_answers_as_the_plain_one(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy_of(tiny_folder, tmp_path / "my model #1 (a=b), ~old")
    shard(folder)
    request = Request("one", "What is it?", max_tokens=4, ignore_eos=True)
    answers = []
    for path in (folder, tiny_folder):
        with start([*SMALL, FEW_TOKENS, "model=auto", f"model.path={path}", "kv.bytes=need"]) as started:
            answers.append(started.engine.generate([request])[0].token_ids)
            assert started.record.config["model"]["path"] == str(path)
            assert started.record.stages[0].metrics["files"] == (2 if path == folder else 1)
    assert answers[0] == answers[1]


def test_random_weights_need_no_weight_files(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy_of(tiny_folder, tmp_path / "model", weights=False)
    given = ("model=auto", f"model.path={folder}", "model.load_format=dummy", "kv.bytes=need")
    with start([*SMALL, FEW_TOKENS, *given]) as started:
        metrics = started.record.stages[0].metrics
        assert (metrics["loader"], metrics["files"]) == ("dummy", 0)
        assert started.record.stages[-1].status == "ok"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("https://ann:s3cret@hub.example/model", "https://***@hub.example/model"),
        ('"s3://key:a@b@host/x", "y@z"', '"s3://***@host/x", "y@z"'),
        ("s3://key:it's@host/x", "s3://***@host/x"),
        ("token=hf_AbCdEfGhIjKlMnOpQrSt.", "token=hf_***."),
        ("https://hub.example/a@b hf_processor", "https://hub.example/a@b hf_processor"),
    ],
)
def test_what_looks_like_a_secret_is_not_written(text: str, written: str) -> None:
    assert redact(text) == written


def test_no_secret_reaches_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokens = ["hf_" + letter * 34 for letter in "abc"]
    monkeypatch.setenv("HF_TOKEN", tokens[0])
    given = f"model.path=https://ann:s3cret@hub.example/{tokens[1]}"
    # A sweep records points that cannot start; a plain start would leave no record of this.
    assert main(["-m", "run.seed=1,2", "model=auto", given, "hydra.sweep.dir=runs"]) == 2
    assert main([*SMALL, "pipeline=profile_only", f"+mm.processor_kwargs.token={tokens[2]}"]) in (0, 1, 2)
    folders = run_folders(tmp_path)
    assert len(folders) >= 2
    for folder in folders:
        text = (folder / FILE_NAME).read_text()
        assert not [secret for secret in ("s3cret", *tokens) if secret in text]
        assert "hub.example" in text or "mm" in json.loads(text)["config"]
