"""A folder of TensorBoard's events for every run: its figures as scalars, its settings as hyperparameters."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from orchestrator import FinishedRun, Tracker, UserError


class TensorBoardTracker(Tracker):
    dir: str = "runs/tensorboard"
    """One folder a run is made in it; `tensorboard --logdir` is given it."""

    def check(self) -> None:
        if find_spec("tensorboard") is None:
            raise UserError("the tracker tensorboard needs TensorBoard; pip install 'orchestrator[tensorboard]'")

    def log(self, run: FinishedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = Path(self.dir) / run.run_id
        # TensorBoard's names for groups have slashes.
        figures = {name.replace(".", "/"): float(value) for name, value in run.numbers.items()}
        settings = {**run.settings, "status": run.status}
        with SummaryWriter(str(folder)) as writer:
            for summary in hparams(settings, figures):  # type: ignore[no-untyped-call]
                writer.file_writer.add_summary(summary)
            for name, value in figures.items():
                writer.add_scalar(name, value)
            writer.add_text("run.json", f"```\n{run.record.read_text()}\n```")
        return str(folder)
