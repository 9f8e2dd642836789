"""Work beside the stages: begun, waited for, stopped, and told in the record."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from orchestrator.beside import Beside, Moment, Stopped, begin_or_do
from orchestrator.clock import Clock
from orchestrator.early import tell_neighbours
from orchestrator.errors import StageError
from orchestrator.records import RunRecord, Span, StageRecord

NUMBER: Moment[int] = Moment("a number")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("beside")]


@pytest.fixture
def beside() -> Beside:
    return Beside(Clock.from_now())


def test_work_runs_in_a_thread_and_its_value_is_waited_for(beside: Beside) -> None:
    go = threading.Event()
    task = beside.begin("wait", lambda _: (go.wait(10), threading.current_thread().name))
    assert task is not None and not task.done
    go.set()
    assert task.result() == (True, "beside: wait")
    assert task.take() == (True, "beside: wait")
    (span,) = beside.spans()
    assert (span.name, span.beside) == ("wait", None) and span.wall_s > 0
    assert beside.close() == [] and threads() == []


def test_an_error_is_raised_where_the_value_is_needed_and_not_before(beside: Beside) -> None:
    def work(_: threading.Event) -> int:
        raise StageError("no")

    task = beside.begin("fail", work)
    assert task is not None and task.join(10)
    for _ in range(2):
        with pytest.raises(StageError, match="no"):
            task.result()


def test_what_is_not_to_run_beside_is_not_begun() -> None:
    beside = Beside(Clock.from_now(), without={"this"})
    assert beside.begin("this", lambda _: 1) is None
    assert begin_or_do(beside, "this", threading.get_ident)() == threading.get_ident()
    assert begin_or_do(None, "that", threading.get_ident)() == threading.get_ident()
    assert begin_or_do(beside, "that", threading.get_ident)() != threading.get_ident()
    assert [span.name for span in beside.spans()] == ["that"]


def test_a_moment_begins_what_waits_for_it_once(beside: Beside) -> None:
    coming = beside.after(NUMBER, "double", lambda number: 2 * number)
    other = beside.after(Moment("never"), "never", lambda _: None)
    assert coming.task is None
    beside.reached(NUMBER, 21)
    task = coming.task
    assert task is not None and task.result() == 42
    beside.reached(NUMBER, 1)
    assert coming.task is task and other.task is None


def test_work_that_is_not_wanted_any_more_is_interrupted_wherever_it_stands(beside: Beside) -> None:
    cleaned = threading.Event()

    def forever(_: threading.Event) -> None:
        try:
            while True:
                time.sleep(0.01)
        except Exception:  # as a library might: it does not see what stops the work
            pass
        finally:
            cleaned.set()

    task = beside.begin("forever", forever)
    waits = beside.begin("waits for it", lambda _: task.result() if task is not None else None)
    assert beside.close() == [] and cleaned.is_set() and threads() == []
    assert task is not None and waits is not None
    with pytest.raises(Stopped):
        task.result()
    assert beside.begin("late", lambda _: 1) is None
    beside.reached(NUMBER, 1)


def test_short_work_ends_by_itself_before_it_would_be_interrupted(beside: Beside) -> None:
    begun = threading.Event()

    def short(_: threading.Event) -> str:
        begun.set()
        time.sleep(0.1)
        return "whole"

    task = beside.begin("short", short)
    assert begun.wait(10) and beside.close() == []
    assert task is not None and task.result() == "whole"


def test_work_that_looks_ends_by_itself(beside: Beside) -> None:
    task = beside.begin("looks", lambda stopping: stopping.wait(10))
    assert task is not None
    task.stopping.set()
    assert task.result() is True


def test_what_does_not_end_in_time_is_named_and_does_not_keep_the_caller(beside: Beside) -> None:
    go = threading.Event()
    task = beside.begin("in a call", lambda _: go.wait(30))
    assert beside.close(grace_s=0.05) == ["in a call"]
    go.set()
    assert task is not None and task.join(10)
    assert beside.close() == []


def test_stopping_at_any_moment_leaves_a_task_that_is_done(beside: Beside) -> None:
    for _ in range(300):
        task = beside.begin("short", lambda _: sum(range(200)))
        assert task is not None
        task.stop()
        assert task.join(10)
    assert beside.close() == []


def test_the_record_says_what_ran_beside_what() -> None:
    record = RunRecord(run_id="x", started_at="now", spans=[Span(name="imports", start_s=0.0, wall_s=2.0)])
    inner = [Span(name="make", start_s=2.5, wall_s=0.2), Span(name="use", start_s=3.1, wall_s=0.1)]
    record.stages = [
        StageRecord(slot="load", use="load", origin="test", status="ok", start_s=2.0, wall_s=1.0),
        StageRecord(slot="make", use="make", origin="test", status="ok", start_s=3.0, wall_s=0.5, spans=inner),
    ]
    files = Span(name="files", start_s=0.5, wall_s=2.0)
    tell_neighbours(record, [files, Span(name="at once", start_s=1.0, wall_s=0.0)])
    assert [(span.name, span.beside) for span in record.spans] == [("imports", None), ("files", "imports, load")]
    assert [(span.name, span.beside) for span in record.stages[1].spans] == [("make", "load"), ("use", None)]


def test_work_leaves_the_interpreter_as_it_was() -> None:
    """In a process of its own: on Python 3.11 a profile did not come back from the first call after such work."""
    program = (
        "import cProfile\n"
        "from orchestrator.beside import Beside\n"
        "from orchestrator.clock import Clock\n"
        "beside = Beside(Clock.from_now())\n"
        "beside.begin('short', lambda _: 1).result()\n"
        "told = beside.begin('told', lambda _: [None for _ in iter(int, 1)])\n"
        "told.stop()\n"
        "assert told.join(10)\n"
        "profile = cProfile.Profile()\n"
        "print(profile.runcall(lambda: (lambda: 'back')()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "back\n"
