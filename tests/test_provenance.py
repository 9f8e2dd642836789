"""What determines a run is in its record, and no secret is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from orchestrator.environment import variables, versions
from orchestrator.model_files import model_files
from orchestrator.provenance import provenance
from orchestrator.registry import Plugin, Registry
from orchestrator.sources import sources_hash
from orchestrator.stages.dummy_item import sha256_of
from tests.toy import composed


def test_the_variables_that_matter_and_no_secret() -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "4",
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": "hf_x",
        "ORCHESTRATOR_TOKEN": "x",
        "NCCL_SECRET_KEY": "x",
        "ORCHESTRATOR_DB_PASSWD": "x",
        "NCCL_AUTH": "x",
        "HOME": "/root",
    }
    found = variables(given)
    assert list(found) == ["CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"]


def test_versions_are_known_without_torch_and_the_same_with_it() -> None:
    without = versions()
    import torch

    assert versions() == without
    assert without["torch"] == torch.__version__.partition("+")[0] or without["torch"] == torch.__version__
    assert without["cuda"] == torch.version.cuda


def test_plugins_that_a_run_could_use(tmp_path: Path) -> None:
    installed = Plugin("stages", "far", "far.away:Far", "far-away 1.2")
    config = composed("+stages.mine.use=tests.planted:Note")
    found = provenance(config, Registry([*Registry.discover().plugins(), installed]))
    assert found.plugins["far-away"] == "1.2"
    assert found.plugins["tests.planted:Note"]
    assert found.sources == sources_hash()


def test_code_that_changes_changes_the_hash(tmp_path: Path) -> None:
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "orchestrator/a.py").write_text("a = 1\n")
    before = sources_hash(tmp_path)
    (tmp_path / "orchestrator/a.py").write_text("a = 2\n")
    assert sources_hash(tmp_path) != before


def test_small_files_are_hashed_whole_and_weights_by_their_header(tmp_path: Path, tiny_folder: Path) -> None:
    found = model_files(tiny_folder)
    config = (tiny_folder / "config.json").read_bytes()
    assert found["config.json"] == {"bytes": len(config), "sha256": hashlib.sha256(config).hexdigest()}
    assert set(found["model.safetensors"]) == {"bytes", "header_sha256"}
    (tmp_path / "torn.safetensors").write_bytes(b"\xff" * 8)
    assert model_files(tmp_path)["torn.safetensors"]["bytes"] == 8


def test_a_fingerprint_of_tensors_sees_names_types_shapes_and_bytes() -> None:
    import torch

    ones = torch.ones(2, 3)
    variants = [{"a": ones}, {"b": ones}, {"a": ones.half()}, {"a": ones.T}, {"a": ones * 2}, {"a": torch.tensor(1.0)}]
    assert len({sha256_of(each) for each in variants}) == len(variants)
    assert sha256_of({"a": ones.bfloat16(), "b": ones}) == sha256_of({"b": ones.clone(), "a": ones.bfloat16()})


@pytest.mark.parametrize("name", ["environment", "sources", "plugins"])
def test_the_schema_names_it(name: str) -> None:
    from orchestrator.schema import generated

    assert name in generated()["$defs"]["ProvenanceRecord"]["properties"]
