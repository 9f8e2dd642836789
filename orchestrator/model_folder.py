"""From a model's name or path to a folder on this machine: one the project makes, one that is there, one from a hub."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from orchestrator.config import ModelConfig
from orchestrator.errors import CheckpointError, ConfigError, UnknownNameError, near_miss
from orchestrator.events import Events, SilentEvents
from orchestrator.hub.fetch import Fetched, already_here, fetch, refuse_absent

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
GGUF, PICKLED = "*.gguf", ("*.bin", "*.pt", "*.pth")
"""Files of weights that are not read."""
_INSTEAD = "give model.path=/a/folder that holds the model"


class ModelMaker(Protocol):
    """What writes a model folder without a hub."""

    @property
    def version(self) -> int:
        """Raised whenever the bytes that `make` writes change."""

    def make(self, folder: Path) -> None: ...


@runtime_checkable
class CheckedMaker(Protocol):
    """A maker that depends on something that may not be there."""

    def check(self) -> None:
        """
        Raises:
            UserError: it is not there.
        """


def find_folder(model: ModelConfig, *, make: Callable[[str], ModelMaker], cache_dir: Path) -> Path:
    """The folder of a model. `make(name)` gives the maker of that name.

    Raises:
        UserError: there is no such folder, hub id or maker, or the cache cannot be written.
    """
    maker = maker_for(model, make)
    if maker is not None:
        return _made(model.name, maker, cache_dir)
    assert model.path is not None
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise ConfigError.of("model.path", f"is a file; give its folder, {folder.parent}", model.path)
    if is_on_hub(model, make):
        return from_hub(model, make, SilentEvents()).folder
    raise ConfigError.of("model.path", f"there is no such folder{_near(folder)}", model.path)


def folder_here(model: ModelConfig) -> Path | None:
    """The folder that `model.path` names, or the local copy of a hub's model; None where there is none."""
    folder = Path(model.path or "").expanduser()
    if model.path is None or folder.is_dir() or not HUB_ID.fullmatch(model.path):
        return folder if model.path is not None and folder.is_dir() else None
    found = already_here(model.path, model.revision, weights=model.load_format == "auto")
    return None if found is None else found.folder


def is_on_hub(model: ModelConfig, make: Callable[[str], ModelMaker]) -> bool:
    """Whether the model is neither made here nor a folder of the user's, but has a hub's name."""
    path = model.path
    if path is None or maker_for(model, make) is not None or Path(path).expanduser().exists():
        return False
    return HUB_ID.fullmatch(path) is not None


def from_hub(model: ModelConfig, make: Callable[[str], ModelMaker], events: Events) -> Fetched:
    """The local copy of a hub's model, downloaded if it is not here; only the files that a start reads.

    Raises:
        ConfigError: it is not here, and the hub does not give it; says what would work.
    """
    assert model.path is not None
    weights = model.load_format == "auto"
    return fetch(model.path, model.revision, weights=weights, events=events, ways=_ways(model, make))


def refuse_absent_from_hub(model: ModelConfig, make: Callable[[str], ModelMaker]) -> None:
    """Refuse a hub's model that is not here and that the hub does not give; downloads nothing.

    Raises:
        ConfigError: as `from_hub`.
    """
    assert model.path is not None
    refuse_absent(model.path, model.revision, weights=model.load_format == "auto", ways=_ways(model, make))


@contextmanager
def refusing_unreadable(model: ModelConfig) -> Iterator[None]:
    """
    Raises:
        CheckpointError: instead of what the operating system says of a file or a folder of the model.
    """
    try:
        yield
    except OSError as error:
        given = "" if model.path is None else f"model.path={model.path}: "
        raise CheckpointError(
            f"{given}{error.filename or 'a file'} cannot be read ({error.strerror}); let this user read it, or "
            f"{_INSTEAD}"
        ) from error


def refuse_running_code(model: ModelConfig) -> None:
    """
    Raises:
        ConfigError: `trust_remote_code` promises what is never done.
    """
    if model.trust_remote_code:
        raise ConfigError.of(
            "model.trust_remote_code",
            "code that comes with a checkpoint is never run; false works, with a model of a class that transformers "
            "has, or one of OpenGVLab's InternVL 2, 2.5 and 3",
            "true",
        )


def maker_for(model: ModelConfig, make: Callable[[str], ModelMaker]) -> ModelMaker | None:
    """The maker that writes the model's folder; None where it is a folder of the user's or a hub's.

    Without weights a hub has nothing that a maker who knows the model's configuration could not write, so it is not
    asked then; except for a revision that was named, which may be another configuration.

    Raises:
        UnknownNameError: the model has no path, and no maker has its name.
    """
    if model.path is None:
        return make(model.name)
    if model.load_format != "dummy" or model.revision is not None or Path(model.path).expanduser().is_dir():
        return None
    try:
        maker = make(model.name)
    except UnknownNameError:
        return None
    return maker if getattr(maker, "hub_id", None) == model.path else None


def check_maker(model: ModelConfig, maker: ModelMaker, cache_dir: Path) -> None:
    """Refuse beforehand what the maker cannot do, unless it has done it already.

    Raises:
        UserError: what the maker needs is not installed.
    """
    if isinstance(maker, CheckedMaker) and not _made_folder(model.name, maker, cache_dir).is_dir():
        maker.check()


def _near(folder: Path) -> str:
    """What the parent folder has instead."""
    if not folder.parent.is_dir():
        return "; a hub id has the form org/name"
    found = near_miss(folder.name, [path.name for path in folder.parent.iterdir() if path.is_dir()])
    return f"; {found}" if found.startswith("did you mean") else f"; {_INSTEAD}"


def _made_folder(name: str, maker: ModelMaker, cache_dir: Path) -> Path:
    kind = type(maker)
    identity = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}:{maker.version}".encode()).hexdigest()
    return cache_dir.expanduser().absolute() / "models" / f"{name}-{identity[:12]}"


def _made(name: str, maker: ModelMaker, cache_dir: Path) -> Path:
    return written(name, maker.make, _made_folder(name, maker, cache_dir), cache_dir)


def written(name: str, write: Callable[[Path], None], target: Path, cache_dir: Path) -> Path:
    """`target`, a folder below `cache_dir`; where it is not there yet, `write` is called on an empty folder that then
    takes its place.

    Raises:
        ConfigError: the cache cannot be written; names `name`.
    """
    if target.is_dir():
        return target
    from safetensors import SafetensorError

    try:
        _write_once(write, target)
    # safetensors wraps what the operating system says about a full disk.
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError.of(
            "cache.dir",
            f"the model '{name}' cannot be written there ({why}); give a folder that is writable and has room",
            cache_dir,
        ) from error
    return target


def _write_once(write: Callable[[Path], None], target: Path) -> None:
    """Write to a temporary folder, then rename it: whoever looks sees all of it or nothing."""
    from filelock import FileLock

    models = target.parent
    models.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}."
    with FileLock(models / f"{target.name}.lock"):
        if target.is_dir():
            return
        for left_by_a_killed_process in models.glob(f"{prefix}*"):
            shutil.rmtree(left_by_a_killed_process, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=models))
        try:
            write(temporary)
            temporary.chmod(0o755)
            temporary.replace(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _ways(model: ModelConfig, make: Callable[[str], ModelMaker]) -> str:
    """What to do where there is no hub."""
    near = _near(Path(model.path or ""))
    ways = [f"download it first where there is a network (`hf download {model.path}`)", _INSTEAD]
    if maker_for(model.model_copy(update={"load_format": "dummy"}), make) is not None:
        ways.append("take random weights of the real size with model.load_format=dummy")
    hint = f"{near.removeprefix('; ')} " if near.startswith("; did you mean") else ""
    return hint + ", or ".join(ways)


def refuse_missing_weights(folder: Path) -> CheckpointError:
    """Why a folder has no weights that could be read, as an error to raise."""
    if any(folder.glob(GGUF)):
        return CheckpointError(f"{folder}: holds GGUF files, which are not read; give the model in safetensors files")
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        return CheckpointError(
            f"{folder}: holds its weights only as pickles ({pickled[0]}), which are not read; convert it once with "
            "transformers (from_pretrained, then save_pretrained to a new folder) or give model.load_format=dummy"
        )
    return CheckpointError(
        f"{folder}: holds no safetensors files; copy or download the weights, or give model.load_format=dummy"
    )
