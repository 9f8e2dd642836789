"""Models from a hub, by a server that speaks as much of its protocol as a download needs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.hub.telling import Telling
from orchestrator.records import read_record
from tests.hub_server import COMMIT
from tests.original_folders import qwen2_pair
from tests.starts import ROOT, only_record
from tests.toy import Lines

LARGE = 1 << 20
LATER = ("dummy_data", "profile_run", "graph_capture", "clear_caches", "allocate_kv", "verify")


class Served:
    """A running hub, and a folder that a user's copies of its models go to."""

    def __init__(self, folder: Path) -> None:
        self.models, self.home, self._log = folder / "models", folder / "home", folder / "log"
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def model(self, hub_id: str = "org/model", size: int = LARGE) -> Path:
        """A model of one large file and a few small ones, and some that no start reads."""
        folder = self.models / hub_id
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        save_file({"weight": torch.randint(0, 256, (size,), dtype=torch.uint8)}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "tokenizer.json").write_text("{}")
        (folder / "README.md").write_text("not needed")
        (folder / "modeling_x.py").write_text("raise SystemExit")
        return folder

    def serve(self, *options: str) -> None:
        self.stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub_server", str(self.models), str(self._log), *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return {
            **kept,
            "HF_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "HF_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            **extra,
        }

    def fetch(self, *arguments: str, **extra: str) -> tuple[int, Any, str]:
        """Exit code, what was fetched or the sentence of the refusal, and what was said meanwhile."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.fetching", *(arguments or ("org/model",))],
            cwd=ROOT,
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            check=False,
        )
        answer = done.stdout.strip()
        return done.returncode, json.loads(answer) if done.returncode == 0 else answer, done.stderr

    def start(self, folder: Path, *overrides: str, **extra: str) -> subprocess.Popen[str]:
        """The command line, under way."""
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "device=cpu", *overrides],
            cwd=folder,
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def requests(self, of: str = "") -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines() if self._log.is_file() else []
        return [entry for entry in map(json.loads, lines) if of in entry["path"]]

    def parts(self) -> list[Path]:
        return sorted(self.home.rglob("*.part"))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "hub")
    served.models.mkdir(parents=True)
    yield served
    served.stop()


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_only_what_a_start_reads_is_downloaded_and_where_others_find_it(hub: Served) -> None:
    source = hub.model()
    hub.serve()
    code, found, said = hub.fetch()
    assert code == 0, said
    folder = Path(found["folder"])
    assert folder == hub.home / "hub" / "models--org--model" / "snapshots" / COMMIT
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (
        found["downloaded"]
        == found["total"]
        == found["advanced"]
        == sum(file.stat().st_size for file in folder.iterdir())
    )
    first, last = said.splitlines()
    assert first.startswith(f"downloading org/model at {COMMIT[:12]}: 3 files, 1.00 MiB, to {hub.home}")
    assert re.fullmatch(r"downloaded 1\.00 MiB in \d+\.\d s", last)
    assert hub.parts() == []
    lookup = (
        "from huggingface_hub import snapshot_download; print(snapshot_download('org/model', local_files_only=True))"
    )
    others = subprocess.run(
        [sys.executable, "-c", lookup], env=hub.environment(), capture_output=True, text=True, check=True
    )
    assert Path(others.stdout.strip()) == folder


def test_a_second_time_only_the_commit_is_asked_for(hub: Served) -> None:
    hub.model()
    hub.serve()
    hub.fetch()
    before = len(hub.requests("resolve"))
    code, found, said = hub.fetch()
    assert (code, found["downloaded"], said) == (0, 0, "")
    assert len(hub.requests("resolve")) == before


def test_a_second_time_nothing_is_written_but_what_is_not_whole(hub: Served) -> None:
    source = hub.model()
    hub.serve()
    folder = Path(hub.fetch()[1]["folder"])
    whole = folder / "model.safetensors"
    before = {path: path.stat().st_mtime_ns for path in hub.home.rglob("*") if ".download" not in path.name}
    hub.fetch()
    assert before == {path: path.stat().st_mtime_ns for path in before}
    # As it is where there are no links, and a copy was interrupted.
    whole.unlink()
    whole.write_bytes(b"not all of it")
    hub.fetch()
    assert whole.read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_login_in_the_hubs_address_is_not_shown(hub: Served) -> None:
    code, sentence, _ = hub.fetch(HF_ENDPOINT="http://ann:s3cret@127.0.0.1:9")
    assert code == 2
    assert "could not be fetched (http://127.0.0.1:9: ConnectError; HF_ENDPOINT names another hub)" in sentence


def test_a_commit_that_is_here_is_asked_of_nobody(hub: Served) -> None:
    hub.model()
    hub.serve()
    hub.fetch()
    before = len(hub.requests())
    code, found, _ = hub.fetch("org/model", COMMIT)
    assert (code, found["commit"], len(hub.requests())) == (0, COMMIT, before)


def test_a_revision_by_name(hub: Served) -> None:
    hub.model()
    hub.serve()
    assert hub.fetch("org/model", "v1")[1]["commit"] == COMMIT
    assert (hub.home / "hub" / "models--org--model" / "refs" / "v1").read_text() == COMMIT
    code, sentence, _ = hub.fetch("org/model", "v2")
    assert (code, sentence) == (2, "model.revision=v2: the hub's org/model has no such revision")


def test_connections_that_break_are_gone_on_with(hub: Served) -> None:
    source = hub.model()
    hub.serve("--broken", "3")
    code, found, _ = hub.fetch()
    assert code == 0
    starts = [entry["start"] for entry in hub.requests("model.safetensors")]
    assert len(starts) == 4
    assert starts == sorted(starts)
    assert starts[1] > 0
    size = (source / "model.safetensors").stat().st_size
    # What had not filled a piece when a connection broke came again.
    assert size <= sum(entry["sent"] for entry in hub.requests("model.safetensors")) < 1.5 * size
    assert found["advanced"] == found["total"]


def test_a_process_that_was_killed_is_gone_on_with(hub: Served) -> None:
    source = hub.model()
    hub.serve("--rate", "400000")
    first = subprocess.Popen([sys.executable, "-m", "tests.fetching", "org/model"], cwd=ROOT, env=hub.environment())
    wait_for(lambda: any(part.stat().st_size > LARGE // 8 for part in hub.parts()))
    first.kill()
    first.wait()
    (part,) = hub.parts()
    have = part.stat().st_size
    assert 0 < have < LARGE
    code, sentence, _ = hub.fetch(HF_HUB_OFFLINE="1")
    assert (code, "no earlier download of it" in sentence) == (2, True)
    hub.serve()
    code, found, _ = hub.fetch()
    assert (code, found["advanced"]) == (0, found["total"])
    assert hub.requests("model.safetensors")[-1]["start"] == have
    assert (Path(found["folder"]) / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_hub_without_ranges_sends_it_all_again(hub: Served) -> None:
    hub.model()
    hub.serve("--broken", "1", "--whole")
    code, found, _ = hub.fetch()
    assert (code, found["advanced"]) == (0, found["total"])
    assert [entry["start"] for entry in hub.requests("model.safetensors")] == [0, 0]


def test_other_bytes_than_announced_are_not_taken(hub: Served) -> None:
    hub.model()
    hub.serve("--garbled")
    code, sentence, _ = hub.fetch()
    assert code == 2
    assert re.search(r"what came for \S+ is not what it announced; start again", sentence)
    assert not (hub.home / "hub" / "models--org--model" / "snapshots").exists()


@pytest.mark.parametrize(
    ("options", "token", "sentence"),
    [
        (
            ("--token", "right"),
            "wrong",
            r"the hub refused the login \(401\); set HF_TOKEN .* `hf auth login`; give a folder",
        ),
        (("--gated",), "right", "asks for a licence and a login first"),
    ],
)
def test_a_login_that_is_refused(hub: Served, options: tuple[str, ...], token: str, sentence: str) -> None:
    hub.model()
    hub.serve(*options)
    code, answer, _ = hub.fetch(HF_TOKEN=token)
    assert code == 2
    assert re.search(sentence, answer)
    assert token not in answer


def test_a_login_that_is_accepted(hub: Served) -> None:
    hub.model()
    hub.serve("--token", "right")
    assert hub.fetch(HF_TOKEN="right")[0] == 0


def test_a_model_that_the_hub_does_not_know(hub: Served) -> None:
    hub.serve()
    code, sentence, _ = hub.fetch("org/modle")
    assert code == 2
    assert sentence.startswith("model.path=org/modle: there is no such folder, and the hub knows no such model")


def test_what_is_here_is_enough_where_there_is_no_hub(hub: Served) -> None:
    hub.model()
    hub.serve()
    hub.fetch()
    hub.stop()
    code, found, said = hub.fetch()
    assert (code, found["commit"]) == (0, COMMIT)
    assert said.startswith(
        f"warning: the hub gave no answer (ConnectError); org/model is taken as it was at {COMMIT[:12]}"
    )
    assert hub.fetch(HF_HUB_OFFLINE="1")[::2] == (0, "")


def test_a_start_from_a_hub_in_the_published_layout(hub: Served, tmp_path: Path) -> None:
    pair = qwen2_pair(hub.models / "OpenGVLab" / "Tiny")
    hub.serve()
    process = hub.start(
        tmp_path,
        "model=auto",
        "model.path=OpenGVLab/Tiny",
        "kv.bytes=need",
        "scheduler.max_model_len=512",
        "scheduler.max_num_seqs=2",
        "stages.verify.max_tokens=2",
    )
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "downloading OpenGVLab/Tiny" in output
    weights = only_record(tmp_path).stages[0]
    assert weights.metrics["revision"] == COMMIT
    assert weights.metrics["downloaded_bytes"] > 0
    assert [span.name for span in weights.spans][:1] == ["download"]
    (folder,) = hub.home.rglob("snapshots/*")
    stored = [load_file(file) for file in sorted(pair.original.glob("*.safetensors"))]
    assert all(
        torch.equal(mine[name], theirs[name])
        for mine, theirs in zip([load_file(file) for file in sorted(folder.glob("*.safetensors"))], stored, strict=True)
        for name in theirs
    )


def test_ctrl_c_while_downloading_keeps_what_came(hub: Served, tmp_path: Path) -> None:
    hub.model()
    hub.serve("--rate", "100000")
    process = hub.start(tmp_path, "model=auto", "model.path=org/model", *(f"~stages.{slot}" for slot in LATER))
    wait_for(lambda: any(part.stat().st_size > LARGE // 16 for part in hub.parts()))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert read_record(next((tmp_path / "runs").iterdir())).status == "interrupted"
    assert [part.stat().st_size > 0 for part in hub.parts()] == [True]


@pytest.mark.parametrize("options", [None, ("--silent",)])
def test_no_hub_and_no_copy_is_one_sentence_before_anything_is_made(
    hub: Served, tmp_path: Path, options: tuple[str, ...] | None
) -> None:
    if options is not None:
        hub.serve(*options)
    process = hub.start(tmp_path, "model=internvl2_5_8b")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    (line,) = errors.splitlines()
    assert re.fullmatch(
        r"error: model\.path=OpenGVLab/InternVL2_5-8B: there is no such folder, .*could not be fetched "
        r"\(http://127\.0\.0\.1:\d+: \w+; HF_ENDPOINT names another hub\); download it first .*model\.path=/a/folder.*"
        r"model\.load_format=dummy",
        line,
    )
    assert not (tmp_path / "runs").exists()


def test_a_long_download_says_how_far_it_is() -> None:
    lines = Lines()
    with lines.progress("download", 200, "B") as progress:
        telling = Telling(lines, progress, 200, every_s=0.0)
        telling.advance(50)
        telling.advance(-50)
        telling.advance(150)
    assert lines.said == ["downloaded 25% of 200 B", "downloaded 0% of 200 B", "downloaded 75% of 200 B"]
