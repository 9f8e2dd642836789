"""Overrides to a configuration, and what a mistake in them says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.compose import Composed, compose, draft_of, read_all
from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.spelling import read
from orchestrator.compose.sweep import prepare
from orchestrator.errors import ConfigError, PluginError
from orchestrator.registry import Plugin, Registry


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        compose(overrides)
    return [str(problem) for problem in raised.value.problems]


def slots(composed: Composed) -> list[str]:
    return [f"{slot}={options['use']}" for slot, options in composed.config.stages.items()]


def test_the_default_needs_nothing() -> None:
    config = compose([]).config
    assert (config.model.name, config.model.path, config.model.dtype) == ("tiny_internvl", None, "float32")
    assert (config.scheduler.max_model_len, config.scheduler.max_num_seqs) == (4096, 8)
    assert config.scheduler.max_num_batched_tokens == 2048
    assert (config.kv.bytes, config.kv.block_size, config.gpu.util) == ("need", 16, 0.9)
    assert config.mm.limit_per_prompt.model_dump() == {"image": 1, "video": 0, "audio": 0}


def test_another_model_takes_what_the_device_has() -> None:
    config = compose(["model=auto", "model.path=/models/a"]).config
    assert (config.kv.bytes, config.scheduler.max_model_len, config.model.dtype) == ("auto", "auto", "auto")


def test_composing_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose(["gpu.util=0.5"])
    refused("gpu.utl=0.5")
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


def test_the_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_CACHE", "/some where/else")
    assert compose([]).config.cache.dir == "/some where/else"
    monkeypatch.delenv("ORCHESTRATOR_CACHE")
    assert compose([]).config.cache.dir == "~/.cache/orchestrator"


def test_slots_are_swapped_dropped_and_appended_in_order() -> None:
    swapped = compose(
        ["stage@stages.clear_caches=free_memory", "~stage@stages.graph_capture", "+stage@stages.last=free_memory"]
    )
    assert slots(swapped) == [
        "load_weights=load_weights",
        "dummy_data=dummy_data",
        "profile_run=profile_run",
        "clear_caches=free_memory",
        "allocate_kv=allocate_kv",
        "verify=verify",
        "last=free_memory",
    ]


def test_a_pipeline_can_stop_after_the_profile() -> None:
    assert list(compose(["pipeline=profile_only"]).config.stages) == ["load_weights", "dummy_data", "profile_run"]


def test_an_option_of_an_appended_stage_can_be_set() -> None:
    overrides = ["+stage@stages.last=free_memory", "stages.last.at_least_bytes=5"]
    assert compose(overrides).config.stages["last"]["at_least_bytes"] == 5


def test_a_stage_without_a_yaml_is_appended_by_reference() -> None:
    overrides = ["+stages.mine={use:orchestrator.stages.verify:Verify}", "stages.mine.max_tokens=3"]
    assert compose(overrides).config.stages["mine"]["max_tokens"] == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gpu.utl=0.5", "gpu.utl=0.5: there is no such key; did you mean gpu.util?"),
        ("util=0.5", "util=0.5: there is no such key; did you mean gpu.util?"),
        ("max_num_seqs=4", "max_num_seqs=4: there is no such key; did you mean scheduler.max_num_seqs?"),
        ("modl=auto", "modl=auto: there is no such key; did you mean model?"),
        ("model=tiny_intrnvl", "model=tiny_intrnvl: there is no model of that name; did you mean tiny_internvl?"),
        ("device=rocm", "device=rocm: there is no device of that name; there are: auto, cpu, cuda"),
        ("pipeline=profil_only", "pipeline=profil_only: there is no pipeline of that name; did you mean profile_only?"),
        ("stge@stages.verify=verify", "stge@stages.verify=verify: there is no such group; did you mean stage?"),
        ("stage@stages.verfy=verify", "stage@stages.verfy=verify: the pipeline has no such slot; did you mean verify?"),
        (
            "stage@stages.verify=verfy",
            "stage@stages.verify=verfy: there is no stage of that name; did you mean verify?",
        ),
        (
            "~stage@stages.graph_captur",
            "stage@stages.graph_captur: the pipeline has no such slot; did you mean graph_capture?",
        ),
        ("stages.verify.num_request=2", "stages.verify.num_request: there is no such key; did you mean num_requests?"),
        ("stages.verify.num_requests=x", "stages.verify.num_requests=x: must be a whole number at least 1"),
        ("stages.verify.use=verfy", "stages.verify.use=verfy: there is no stage of that name; did you mean verify?"),
        ("+scheduler.max_model_ln=3", "scheduler.max_model_ln: there is no such key; did you mean max_model_len?"),
        (
            "model.dtype=float23",
            "model.dtype=float23: must be auto, float32, float16 or bfloat16; did you mean float32?",
        ),
        (
            'gpu.util="0.5"',
            "gpu.util='0.5': must be a number above 0 and at most 1; without the quotes, gpu.util=0.5, it is one",
        ),
        ("gpu.util=2", "gpu.util=2: must be a number above 0 and at most 1"),
        (
            "mm.image.max_size=[1,2,3]",
            "mm.image.max_size=[1, 2, 3]: must be a list, each item a whole number above 0, 2 of them, or null",
        ),
        (
            "model=/a/folder",
            "model=/a/folder: is not the name of a model; a folder or hub id is given as model=auto "
            "model.path=/a/folder",
        ),
        (
            "model=org/name",
            "model=org/name: is not the name of a model; a folder or hub id is given as model=auto model.path=org/name",
        ),
        (
            "gpu.util=0.5,0.6",
            "gpu.util=0.5,0.6: several values need -m (a sweep); a list is written [0.5,0.6], one text with a comma ",
        ),
        ("model=auto,tiny_internvl", "model=auto,tiny_internvl: several values need -m (a sweep)"),
        ("report", "report: is not an override; write key=value"),
        ("a b=3", "a b=3: cannot be the name of a key; write key=value"),
        ("hydra.run.dir=/x", "hydra.run.dir=/x: is not used here; give run.dir"),
        ("run.dir=${nothing.here}", "run.dir: Interpolation key 'nothing.here' not found"),
        ("hydra/launcher=mine", "hydra/launcher=mine: there is no hydra/launcher of that name; there are: basic"),
    ],
)
def test_a_mistake_names_the_field_and_what_would_work(override: str, message: str) -> None:
    found = refused(override)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_no_message_is_advice_to_force_a_key() -> None:
    for override in ("gpu.utl=0.5", "nothing.at.all=1", "stages.verify.x=1", "xyz=1", "stages.nothing=1"):
        assert "+" not in " ".join(refused(override))


def test_every_problem_is_listed() -> None:
    found = refused("gpu.utl=0.5", "model=tiny_intrnvl", "run.seed=x", "stages.verify.num_request=2", "kv.bytes=lots")
    assert [line.partition("=")[0].partition(":")[0] for line in found] == [
        "model",
        "gpu.utl",
        "kv.bytes",
        "run.seed",
        "stages.verify.num_request",
    ]


def test_missing_values_are_listed_together() -> None:
    assert refused("model=auto", "gpu.util=???", "run.seed=???") == [
        "gpu.util: is required; give gpu.util=VALUE",
        "model.path: is required; give model.path=VALUE",
        "run.seed: is required; give run.seed=VALUE",
    ]


def test_a_choice_given_twice_is_refused() -> None:
    assert refused("model=auto", "model=tiny_internvl") == ["model: is chosen twice; keep one"]


@pytest.mark.parametrize(
    "path",
    [
        "/a b/c",
        "~/models/x",
        "/a#b",
        "/a(b)/c",
        "/a=b",
        "/run 1/~x#(2)=3",
        "/it's",
        '/say "so"',
        "/a\\ b",
        "/a\\,b",
        "/trailing/ ",
        " /leading",
        "/a,b",
        "/a, b/c",
        "/{a}/[b]",
        "[a]",
        "{a:1}",
        "/a&b;c|d",
        "/a$b",
        "/a%40b@c",
        "/ä/日本",
        "int(3)",
        "models(1)",
        "2024",
        "1e3",
        "007",
        "1_000",
        "true",
        "/a\tb",
        "C:\\models\\x",
        "/ends/with\\",
        "-",
        "/a//b/../c",
        "/a:b",
        "/a?*",
    ],
)
def test_a_path_arrives_as_it_was_typed(path: str) -> None:
    assert compose([f"run.dir={path}"]).config.run.dir == path


def test_text_quoted_for_hydra_is_unquoted() -> None:
    assert compose(["run.dir='/a b, c'"]).config.run.dir == "/a b, c"
    assert compose(["run.dir=null"]).config.run.dir is None
    assert compose(["run.dir=${oc.env:HOME}/a (b)"]).config.run.dir == f"{os.environ['HOME']}/a (b)"


def test_paths_that_are_a_list_need_a_sweep() -> None:
    assert "need -m" in refused("model.path=/a,/b")[0]


@pytest.mark.parametrize(
    ("override", "limits"),
    [
        ('mm.limit_per_prompt={"image":2}', (2, 0, 0)),
        ('mm.limit_per_prompt={"image": 2, "video": 1}', (2, 1, 0)),
        ("mm.limit_per_prompt={image:3}", (3, 0, 0)),
        ("mm.limit_per_prompt.audio=1", (1, 0, 1)),
    ],
)
def test_mappings_are_taken_as_json_and_as_hydra_writes_them(override: str, limits: tuple[int, int, int]) -> None:
    found = compose([override]).config.mm.limit_per_prompt
    assert (found.image, found.video, found.audio) == limits


def test_options_of_the_processor_are_open() -> None:
    overrides = ["mm.processor_kwargs.max_pixels=602112", 'mm.processor_kwargs={"size":{"longest edge":3},"on":true}']
    kwargs = compose(overrides).config.mm.processor_kwargs
    assert kwargs == {"max_pixels": 602112, "size": {"longest edge": 3}, "on": True}


def test_one_more_folder_of_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "my conf (1)"
    (folder / "gpu").mkdir(parents=True)
    (folder / "gpu/half.yaml").write_text("util: 0.5\nindex: 0\ntotal_bytes: null\nspec: null\n")
    assert compose(["gpu=half"], config_dir=folder).config.gpu.util == 0.5
    with pytest.raises(ConfigError, match="there is no such folder"):
        compose([], config_dir=tmp_path / "nothing")


def test_two_folders_with_the_same_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pkg/conf/device").mkdir(parents=True)
    (tmp_path / "pkg/conf/device/cpu.yaml").write_text("kind: cpu\n")
    registry = Registry([Plugin("conf", "pkg", "pkg:conf", "plugins/pkg", tmp_path)])
    with pytest.raises(PluginError, match=r"device/cpu is brought by .* and by "):
        ConfigFolders.find(registry)


def test_a_sweep_is_prepared_for_hydra_and_bad_points_are_left_to_their_jobs() -> None:
    registry = Registry.discover()
    folders = ConfigFolders.find(registry)
    overrides = ["gpu.util=0.5,7", "model=tiny_internvl,nope", "model.path=/a b,/c(d)", "graphs.sizes=[1,2],[4]"]
    assert prepare(overrides, registry, folders) == [
        "gpu.util=0.5,7",
        "model=tiny_internvl,nope",
        "model.path=/a b,'/c(d)'",
        "graphs.sizes=[1,2],[4]",
    ]
    with pytest.raises(ConfigError, match=r"gpu\.utl=0\.5: there is no such key; did you mean gpu\.util\?"):
        prepare(["gpu.utl=0.5,0.6"], registry, folders)
    with pytest.raises(ConfigError, match=r"run\.seed=x: must be a whole number"):
        prepare(["gpu.util=0.5,0.6", "run.seed=x"], registry, folders)


def test_what_only_some_points_lack_does_not_end_a_sweep() -> None:
    registry = Registry.discover()
    folders = ConfigFolders.find(registry)
    prepare(["model=auto,tiny_internvl"], registry, folders)
    prepare(["pipeline=profile_only,default", "stages.verify.num_requests=2"], registry, folders)
    with pytest.raises(ConfigError, match=r"model\.path: is required"):
        prepare(["model=auto", "gpu.util=0.5,0.6"], registry, folders)


def test_every_value_of_a_sweep_is_known() -> None:
    assert read("gpu.util=0.5,0.6", multirun=True).sweep == ("0.5", "0.6")
    assert read("run.seed=range(0,3)", multirun=True).sweep == ("0", "1", "2")
    assert read('mm.limit_per_prompt={"image":1},{"image":2}', multirun=True).sweep == ("{image:1}", "{image:2}")
    assert read("model.path=/a", multirun=True).sweep == ()


def test_a_draft_keeps_what_could_be_applied() -> None:
    folders = ConfigFolders.find(Registry.discover())
    draft = draft_of(read_all(["gpu.utl=0.5", "gpu.util=0.4"]), folders)
    assert [each.head for each in draft.used] == ["gpu.util"]
    assert draft.raw["gpu"]["util"] == 0.4
