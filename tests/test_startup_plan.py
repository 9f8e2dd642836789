"""Start-up plans: taken over by the same fingerprint and by no other, held against the process, and never trusted."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator import pipeline, start
from orchestrator.cache import Entry, fingerprint
from orchestrator.cache.contents import Contents
from orchestrator.errors import BudgetError
from orchestrator.memory.snapshot import Peak
from orchestrator.records import RunRecord, read_record
from orchestrator.registry import Registry
from orchestrator.sources import code_of, identity_of, own_code
from orchestrator.startup_plan.deviation import deviation, differs
from orchestrator.startup_plan.fingerprint import parts
from orchestrator.startup_plan.learned import Learned, Measured, Part
from orchestrator.units import MiB
from tests.learning import Card, Learning, plan_key, prepared, run, stored
from tests.starts import FEW_TOKENS, SMALL, command_line


def test_the_second_start_makes_no_dummy_data_and_profiles_nothing(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path, run_id="second")
    assert (first.plan()["status"], second.plan()["status"]) == ("miss", "hit")
    assert (first.engine.made, second.engine.made) == (["image"], [])
    assert (first.profiled, second.profiled) == (True, False)
    assert second.plan()["run_id"] == "first" and second.plan()["age_s"] >= 0
    assert second.stage("dummy_data").status == "skipped"
    assert second.stage("dummy_data").metrics["processor_calls"] == 0


def test_the_worst_step_is_the_only_whole_step_of_a_second_start(tmp_path: Path) -> None:
    run(tmp_path)
    calls = run(tmp_path, "stages.verify.mode=off").engine.calls
    assert calls == ["step 2", "repeat encoder.image", "repeat language_model", "repeat logits"]


def test_the_ledger_of_a_second_start_is_that_of_the_first(tmp_path: Path) -> None:
    first, second = run(tmp_path), run(tmp_path)
    assert second.ctx.ledger.accounts == first.ctx.ledger.accounts
    assert second.blocks == first.blocks
    assert second.ctx.ledger.residual_bytes == 0
    of = "profile_run"
    for figure in ("peaks_bytes", "allocated_bytes", "set_by", "micro_batch", "encoder_items", "num_tokens"):
        assert second.stage(of).metrics[figure] == first.stage(of).metrics[figure]


def test_a_miss_says_what_has_changed(tmp_path: Path) -> None:
    assert run(tmp_path).plan("dummy_data")["why"] == "the first start of this model here"
    other = run(tmp_path, "scheduler.max_num_seqs=3", "mm.image.max_size=[8,8]", device=Card(driver="2"))
    assert other.plan()["why"] == "other than at the last start: device, mm, scheduler"
    assert "no start-up plan: other than at the last start: device, mm, scheduler" in other.said


@pytest.mark.parametrize("name", ["checkpoint", "engine"])
def test_a_miss_says_that_the_checkpoint_or_what_the_engine_names_has_changed(tmp_path: Path, name: str) -> None:
    for number in range(2):
        made = Learning(Card(), plan_identity={"attention": "toy", name: str(number)})
        done = run(tmp_path, engine=made)
    assert done.plan()["why"] == f"other than at the last start: {name}"


def test_off_neither_reads_nor_writes(tmp_path: Path) -> None:
    for _ in range(2):
        done = run(tmp_path, "startup_plan=off")
        assert done.plan() == {"status": "off", "why": "startup_plan=off"}
        assert done.profiled
    assert run(tmp_path).plan()["status"] == "miss"


def test_refresh_learns_anew_and_replaces(tmp_path: Path) -> None:
    run(tmp_path)
    again = run(tmp_path, "startup_plan=refresh", run_id="again")
    assert again.plan()["status"] == "refreshed" and again.profiled
    assert run(tmp_path).plan()["run_id"] == "again"


@pytest.mark.parametrize(
    ("override", "why"),
    [("cache.enabled=false", "cache.enabled=false"), ("~stage@stages.allocate_kv", "measures and goes no further")],
)
def test_where_no_plan_is_looked_for_the_record_says_why(tmp_path: Path, override: str, why: str) -> None:
    more = ("~stage@stages.verify",) if "allocate" in override else ()
    done = run(tmp_path, override, *more)
    assert done.plan("profile_run")["status"] == "off"
    assert why in done.plan("profile_run")["why"]


WITHOUT_EFFECT = [
    "gpu.util=0.6",
    "gpu.total_bytes=6GiB",
    "kv.bytes=need",
    "run.dir=elsewhere",
    "run.seed=3",
    "log.json=true",
    "cache.max_bytes=1GiB",
    "startup_plan=refresh",
    "model.name=other",
    "stages.verify.mode=stress",
    "stages.profile_run.timeout_s=60",
    "+stage@stages.last=free_memory",
]


def key(folder: Path, *overrides: str, engine: Learning | None = None, device: Card | None = None) -> str:
    ctx, made, _ = prepared(folder, *overrides, engine=engine, device=device)
    return fingerprint(parts(ctx, made, made))


@pytest.mark.parametrize("override", WITHOUT_EFFECT)
def test_what_has_no_effect_is_not_in_the_fingerprint(tmp_path: Path, override: str) -> None:
    assert key(tmp_path, override) == key(tmp_path)


@pytest.mark.parametrize(
    "override",
    [
        "scheduler.max_num_seqs=3",
        "scheduler.max_num_batched_tokens=64",
        "mm.limit_per_prompt.image=2",
        "mm.image.max_size=[8,8]",
        "mm.video.max_frames=4",
        "mm.processor_kwargs={max_patches: 1}",
        "encoder.compute_budget=64",
        "encoder.cache_size=64",
        "encoder.micro_batch=1",
        "kv.block_size=32",
        "graphs.mode=none",
        "graphs.sizes=[1]",
        "model.load_format=dummy",
        "model.profiler=generic",
        "~stage@stages.clear_caches",
        "stage@stages.clear_caches=free_memory",
    ],
)
def test_what_has_an_effect_is_in_the_fingerprint(tmp_path: Path, override: str) -> None:
    assert key(tmp_path, override) != key(tmp_path)


def test_the_device_type_and_the_driver_are_in_the_fingerprint(tmp_path: Path) -> None:
    same, other, newer = (key(tmp_path, device=card) for card in (Card(), Card("another"), Card(driver="2")))
    assert same == key(tmp_path)
    assert len({same, other, newer}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"plan_identity": {"checkpoint": "b", "attention": "toy"}},
        {"plan_identity": {"checkpoint": "a", "attention": "another"}},
        {"max_model_len": 128},
        {"processor_identity": "edited"},
        {"encoder_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_the_model_and_its_files_are_in_the_fingerprint(tmp_path: Path, change: dict[str, Any]) -> None:
    assert key(tmp_path, engine=Learning(Card(), **change)) != key(tmp_path)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "LD_PRELOAD"])
def test_the_allocator_s_mode_is_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = key(tmp_path)
    monkeypatch.setenv(name, "another")
    assert key(tmp_path) != before


def test_a_plugin_that_is_edited_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = tmp_path / "edited_stage.py"
    source = "from orchestrator import Stage\n\n\nclass Edited(Stage):\n    def run(self, ctx):\n        return 'one'\n"
    plugin.write_text(source)
    mine = "stages.clear_caches.use=edited_stage:Edited"
    try:
        before = key(tmp_path, mine)
        assert key(tmp_path, mine) == before
        plugin.write_text(source.replace("one", "two"))
        assert key(tmp_path, mine) != before
    finally:
        sys.modules.pop("edited_stage", None)


def test_code_is_what_files_hold(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("a = 1\n")
    before = own_code(tmp_path)
    (tmp_path / "notes.txt").write_text("no code")
    assert own_code(tmp_path) == before
    (tmp_path / "part" / "a.py").write_text("a = 2\n")
    assert own_code(tmp_path) != before
    assert code_of(Learning) and code_of(int) == []
    assert identity_of(Learning) != identity_of(Card)


def halve(folder: Path, part: str, *figures: str) -> None:
    """Write the plan again, with half of what it says of a part."""
    ctx, _, _ = prepared(folder)
    at, entry = plan_key(ctx), ctx.cache.get(plan_key(ctx))
    assert entry is not None
    for figure in figures:
        entry.meta["facts"]["measured"]["parts"][part][figure] //= 2
    assert ctx.cache.put(at, entry)


@pytest.mark.parametrize("part", ["language_model", "encoder.image"])
@pytest.mark.parametrize("figures", [("above", "reserved"), ("above",), ("reserved",)], ids=" and ".join)
@pytest.mark.parametrize("size", ["kv.bytes=auto", "kv.bytes=64MiB"])
def test_a_halved_peak_is_caught_and_profiled_anew(
    tmp_path: Path, part: str, figures: tuple[str, ...], size: str
) -> None:
    first = run(tmp_path, size)
    halve(tmp_path, part, *figures)
    caught = run(tmp_path, size, run_id="caught")
    assert caught.stage("profile_run").metrics["startup_plan"]["status"] == "hit"
    assert caught.plan()["status"] == "drifted" and part in caught.plan()["why"]
    (warning,) = [line for line in caught.said if line.startswith("warning")]
    assert "does not hold" in warning and "profiling anew" in warning
    assert caught.profiled and caught.engine.made == []
    assert caught.blocks == first.blocks
    assert caught.ctx.ledger.accounts == first.ctx.ledger.accounts
    assert run(tmp_path, size).plan() | {"age_s": 0} == {"status": "hit", "age_s": 0, "run_id": "caught"}


@pytest.mark.parametrize("part", ["language_model", "encoder.image"])
def test_a_plan_that_does_not_know_a_part_is_caught(tmp_path: Path, part: str) -> None:
    first = run(tmp_path, "kv.bytes=64MiB")
    ctx, _, _ = prepared(tmp_path)
    at, entry = plan_key(ctx), ctx.cache.get(plan_key(ctx))
    assert entry is not None
    del entry.meta["facts"]["measured"]["parts"][part]
    assert ctx.cache.put(at, entry)
    caught = run(tmp_path, "kv.bytes=64MiB")
    assert caught.plan()["why"] == f"of {part} it says nothing; profiling anew"
    assert caught.ctx.ledger.accounts == first.ctx.ledger.accounts


def test_a_refusal_by_a_peak_that_was_learned_says_so(tmp_path: Path) -> None:
    run(tmp_path)
    ctx, _, _ = prepared(tmp_path, "gpu.util=0.1")
    registry = Registry.discover()
    slots = pipeline.build(ctx.config.stages, registry)
    record = RunRecord(run_id="small", started_at="", overrides=[], config={}, stages=pipeline.not_run(slots))
    refused = pipeline.run(slots, ctx, record)
    assert isinstance(refused, BudgetError)
    said = r"set by language_model \(learned \d+ s ago by first; startup_plan=refresh measures it\)"
    assert re.search(said, str(refused))


def test_a_step_that_takes_more_than_it_did_is_caught(tmp_path: Path) -> None:
    run(tmp_path)
    grown = run(tmp_path, engine=Learning(Card(), step_peak=500 * MiB))
    assert grown.plan()["why"].startswith("language_model takes 500.00 MiB, and 400.00 MiB were expected")
    assert grown.ctx.ledger.accounts["peak_activation"] == 500 * MiB


def test_within_the_tolerance_a_plan_holds_and_the_cache_is_sized_by_what_was_measured(tmp_path: Path) -> None:
    run(tmp_path)
    a_little_more = run(tmp_path, engine=Learning(Card(), step_peak=410 * MiB))
    assert a_little_more.plan()["status"] == "hit"
    assert a_little_more.ctx.ledger.accounts["peak_activation"] == 410 * MiB


def test_graphs_of_another_size_are_noted_and_the_plan_is_replaced(tmp_path: Path) -> None:
    run(tmp_path)
    more = run(tmp_path, engine=Learning(Card(), graph_bytes=256 * MiB), run_id="more")
    assert more.plan()["why"] == "graphs take 256.00 MiB, and 64.00 MiB were expected"
    assert not more.profiled
    assert stored(more.ctx).facts.graph_bytes == 256 * MiB


def test_where_only_the_resident_set_is_read_serving_shows_a_plan_that_is_wrong(tmp_path: Path) -> None:
    sizes = "kv.bytes=need"
    run(tmp_path, sizes, device=Card(source="rss"))
    halve(tmp_path, "language_model", "above", "reserved")
    halve(tmp_path, "encoder.image", "above", "reserved")
    caught = run(tmp_path, sizes, device=Card(source="rss"))
    assert caught.plan("verify")["status"] == "drifted"
    assert caught.ctx.ledger.accounts["peak_activation"] == 400 * MiB
    assert run(tmp_path, sizes, device=Card(source="rss")).plan()["status"] == "miss"


def test_where_only_the_resident_set_is_read_the_rehearsal_replaces_what_was_learned(tmp_path: Path) -> None:
    run(tmp_path, device=Card(source="rss"))
    halve(tmp_path, "language_model", "above", "reserved")
    done = run(tmp_path, device=Card(source="rss"))
    assert done.plan()["status"] == "hit"
    assert done.ctx.ledger.accounts["peak_activation"] == 400 * MiB


def test_a_search_that_a_lack_of_memory_ended_is_not_kept(tmp_path: Path) -> None:
    refused = run(tmp_path, engine=Learning(Card(), items_in_a_call=1))
    assert refused.stage("profile_run").metrics["micro_batch_trials_bytes"]["image"]["2"] is None
    assert any(line.startswith("no start-up plan is kept") for line in refused.said)
    assert run(tmp_path).plan()["status"] == "miss"


def test_a_cache_that_cannot_be_written_serves_what_it_holds(tmp_path: Path) -> None:
    locks = run(tmp_path).ctx.cache.folder / "locks"
    shutil.rmtree(locks)
    locks.write_text("no folder, so nothing can be locked, and so nothing written")
    assert run(tmp_path).plan()["status"] == "hit"
    refreshed = run(tmp_path, "startup_plan=refresh")
    assert refreshed.plan()["status"] == "refreshed"
    assert any("cannot be written" in line for line in refreshed.said)


def test_a_torn_entry_is_a_miss(tmp_path: Path) -> None:
    first = run(tmp_path)
    row = next(row for row in Contents(first.ctx.cache.folder)._rows() if row.key == plan_key(first.ctx))
    file = first.ctx.cache.folder / "entries" / str(row.filename)
    file.write_bytes(file.read_bytes()[:-10])
    second = run(tmp_path)
    assert second.plan()["status"] == "miss" and second.profiled
    assert any("is not used" in line for line in second.said)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda meta: meta.pop("facts"), "what is kept cannot be used"),
        (lambda meta: meta.pop("step"), "it holds no step"),
        (lambda meta: meta["facts"]["measured"]["parts"]["logits"].update(above=-1), "greater than or equal to 0"),
        (lambda meta: meta["facts"].update(graph_bytes="1"), "graph_bytes"),
    ],
    ids=["no facts", "no step", "negative", "text"],
)
def test_an_entry_of_another_form_is_a_miss(tmp_path: Path, change: Any, why: str) -> None:
    ctx = run(tmp_path).ctx
    at = plan_key(ctx)
    entry = ctx.cache.get(at)
    assert entry is not None
    change(entry.meta)
    ctx.cache.put(at, entry)
    second = run(tmp_path)
    assert second.plan()["status"] == "miss" and why in second.plan()["why"]
    assert run(tmp_path).plan()["status"] == "hit"


def test_a_step_that_the_engine_cannot_repeat_is_profiled_anew(tmp_path: Path) -> None:
    ctx = run(tmp_path).ctx
    at = plan_key(ctx)
    entry = ctx.cache.get(at)
    assert entry is not None
    ctx.cache.put(at, Entry({}, {**entry.meta, "step": {}}))
    second = run(tmp_path)
    assert second.plan()["status"] == "drifted" and second.profiled
    assert run(tmp_path).plan()["status"] == "hit"


def test_starts_at_once_learn_alone_and_leave_one_plan(tmp_path: Path) -> None:
    done = []
    threads = [threading.Thread(target=lambda: done.append(run(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.blocks for each in done}) == 1 and len(done) == 3
    assert run(tmp_path).plan()["status"] == "hit"


def test_a_stage_that_asks_for_dummy_data_gets_them(tmp_path: Path) -> None:
    asks = "+stages.asks.use=tests.learning_stage:Asks"
    for status in ("miss", "hit"):
        done = run(tmp_path, "~stage@stages.clear_caches", asks)
        assert done.plan("dummy_data")["status"] == status
        assert done.stage("dummy_data").status == "ok"
        assert done.stage("asks").metrics["images"] == 1


def test_a_list_of_the_cache_names_them(tmp_path: Path) -> None:
    run(tmp_path)
    (about,) = [each.about for each in Contents(tmp_path / "cache").entries() if each.about["kind"] == "startup plan"]
    assert about == {"kind": "startup plan", "model_type": "squares", "on": "card"}


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    learned = stored(run(tmp_path).ctx)
    assert Learned.of(learned.entry({})) == learned
    assert [graph.size for graph in learned.facts.graphs] == [2, 1]
    assert learned.facts.kernels == "toy"


def measured(**parts: Part) -> Measured:
    return Measured(
        parts=parts, items={}, most_tokens={}, shapes={}, micro_batch={}, piece_tokens={}, trials={}, trials_kept=0
    )


def test_what_deviates() -> None:
    part = Part.of(Peak(1000 * MiB, 1100 * MiB, 0), inputs=100 * MiB)
    known = measured(step=part)
    assert deviation(known, {"step": 1000 * MiB}, 0) is None
    assert deviation(known, {"step": 1130 * MiB}, 0) is None
    assert deviation(known, {"step": 970 * MiB}, 0) is None
    assert deviation(known, {"step": 1150 * MiB}, 0) is not None
    assert deviation(known, {"step": 950 * MiB}, 0) is not None
    assert deviation(known, {"step": 950 * MiB}, 64 * MiB) is None
    assert deviation(known, {}, 0) == "step is not a part of the step"
    assert deviation(known, {"step": 1000 * MiB, "other": 0}, 0) == "of other it says nothing"
    assert differs(100 * MiB, 130 * MiB, 0) and not differs(100 * MiB, 110 * MiB, 0)


def started(folder: Path, name: str, *overrides: str) -> Any:
    place = folder / name
    process = command_line(folder, *SMALL, FEW_TOKENS, f"cache.dir={folder / 'cache'}", f"run.dir={place}", *overrides)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return read_record(place), out


def test_two_starts_by_the_command_line(tmp_path: Path) -> None:
    first, _ = started(tmp_path, "one")
    second, said = started(tmp_path, "two", "gpu.util=0.7")
    plans = [
        {stage.slot: stage.metrics["startup_plan"] for stage in record.stages if "startup_plan" in stage.metrics}
        for record in (first, second)
    ]
    assert {each["status"] for each in plans[0].values()} == {"miss"}
    assert {each["status"] for each in plans[1].values()} == {"hit"}
    assert {each["run_id"] for each in plans[1].values()} == {first.run_id}
    assert "not needed: the start-up plan knows the costliest items" in said
    assert f"by {first.run_id}" in said
    spans = {stage.slot: [span.name for span in stage.spans] for stage in second.stages}
    assert spans["profile_run"] == ["compile kernels", "warm up"]
    assert second.kv_cache == first.kv_cache
    assert json.dumps(second.config)


def test_the_real_engine_repeats_a_step_that_it_never_ran(tmp_path: Path) -> None:
    common = [*SMALL, FEW_TOKENS, f"cache.dir={tmp_path / 'cache'}", "kv.bytes=auto", "gpu.util=0.5"]
    more = ["mm.limit_per_prompt.video=1", "mm.video.max_frames=2", "scheduler.max_model_len=512"]
    with start([*common, *more, f"run.dir={tmp_path / 'one'}"]) as one:
        remembered = one.engine.remembered_step()  # type: ignore[attr-defined]
    with start([*common, *more, f"run.dir={tmp_path / 'two'}"]) as two:
        again = two.engine.remembered_step()  # type: ignore[attr-defined]
        spans = [span.name for stage in two.record.stages for span in stage.spans]
    assert again.meta == remembered.meta
    assert again.tensors.keys() == remembered.tensors.keys()
    assert "rehearsal" in spans and "language_model" not in spans
    status = next(stage.metrics["startup_plan"]["status"] for stage in two.record.stages if stage.slot == "allocate_kv")
    assert status == "hit"
