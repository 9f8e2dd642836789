"""`python -m orchestrator.plan` with the real planner, on models that plan in a moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.plan.__main__ import main
from orchestrator.planning import plan
from tests.original_folders import qwen2_pair
from tests.starts import environment
from tests.test_readme import Command, of_module

TINY = ("model=tiny_internvl", "kv.bytes=auto", "scheduler.max_num_batched_tokens=512")


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    return code, capsys.readouterr().out


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, text = ran(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(text)


def test_fit_says_what_planned_starts_come_to(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, "fit", "--gpus", "h200,l4", "--utils", "0.05,0.9", *TINY)
    assert [(row["card"], row["util"]) for row in rows] == [("h200", 0.05), ("h200", 0.9), ("l4", 0.05), ("l4", 0.9)]
    for row in rows[1:]:
        record = plan([f"gpu={row['card']}", f"gpu.util={row['util']}", *TINY])
        assert record.kv_cache is not None and record.ledger is not None
        assert row["num_gpu_blocks"] == record.kv_cache.num_gpu_blocks
        assert row["kv_cache_bytes"] == record.ledger.accounts["kv_cache"]
        assert row["max_model_len"] == min(32768, record.kv_cache.num_tokens)
        for account in ("weights", "context", "non_torch", "cudagraph"):
            assert row["accounts"][account] == record.ledger.accounts[account]


def test_fit_is_a_table_and_fails_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ran(capsys, "fit", "gpu=l4", "--utils", "0.01", *TINY)
    assert code == 1
    lines = text.splitlines()
    assert lines[1].split()[:3] == ["l4", "0.01", "no"] and "would work" in lines[1]
    assert lines[-1].startswith("not planned, and in no figure: ")


def test_solve_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    solution = shown(capsys, "solve", "gpu.util", "gpu=l4", *TINY)
    value = solution["value"]
    assert solution["checks"] == {value: True, f"{float(value) - 0.01:.2f}": False}
    assert solution["command"].split() == ["python", "-m", "orchestrator", *TINY, f"gpu.util={value}"]
    code, text = ran(capsys, "solve", "max_model_len", "gpu=l4", *TINY)
    assert code == 0 and "the model has positions for 32,768 tokens" in text


def test_a_checkpoint_in_its_authors_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ("gpu=l4", "model=auto", f"model.path={qwen2_pair(tmp_path / 'model').original}", "kv.bytes=need")
    exported = shown(capsys, "export", "vllm", *given, "scheduler.max_model_len=128")
    assert exported["command"][exported["command"].index("--max-model-len") + 1] == "128"


def test_export_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "export", "vllm", "gpu=l4", "model=opt_125m", "scheduler.max_num_batched_tokens=512")
    assert out["command"][:3] == ["vllm", "serve", "facebook/opt-125m"]
    assert "--limit-mm-per-prompt" not in out["command"]
    assert out["means"] and out["cannot"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["solve", "images", "gpu=l4", "model=opt_125m"], "this model takes no images"),
        (["solve", "gpu.util", "gpu=l4", "model=tiny_internvl"], "with a size in kv.bytes no gpu.util is consulted"),
        (["solve", "images", "gpu=l4", *TINY, "scheduler.max_model_len=320"], "the costliest is 320 tokens; give 321"),
        (["export", "vllm", "gpu=l4", "model=tiny_internvl"], "model.name=tiny_internvl: this model is made by"),
        (["export", "vllm", "model=opt_125m"], "gpu: is required; give one of a100_40g, "),
        (["fit", "--gpus", "l40,l4", "model=opt_125m"], "gpu=l40: there is no card of that name; did you mean l4"),
        (["fit", "--gpus", "l4", "modl=opt_125m"], "modl=opt_125m: there is no such key; did you mean model?"),
        (["fit", "gpu=l4,h200", "model=opt_125m"], "gpu=l4,h200: is several values, and a plan is of one; `fit`"),
        (["fit", "gpu=l4", "pipeline=profile_only"], "the pipeline allocates no KV cache"),
        (["fit", "gpu=l4", "scheduler.max_model_len=99999"], "the model has positions for 32768 tokens"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


@pytest.mark.parametrize("arguments", [["fit", "--utils", "1.5"], ["fit", "--util", "x=y", "-q"], ["solve", "kv"], []])
def test_arguments_that_are_none(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_help_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from orchestrator.plan.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as stopped:\n"
        "    sys.exit(stopped.code or ('torch' in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in ("fit", "solve", "export"))


@pytest.mark.parametrize("command", of_module("orchestrator.plan"), ids=lambda command: command.text)
def test_the_commands_of_the_readme(capsys: pytest.CaptureFixture[str], command: Command) -> None:
    assert ran(capsys, *command.arguments)[0] == 0
