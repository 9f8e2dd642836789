"""A hub's model as a folder on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.errors import CheckpointError, ConfigError
from orchestrator.events import Events
from orchestrator.hub.download import download
from orchestrator.hub.listing import Listing, RefusedError, RemoteFile, UnreachableError, ask
from orchestrator.hub.store import Store
from orchestrator.hub.telling import Telling
from orchestrator.tensorfile import find_weight_files
from orchestrator.units import format_size

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
WEIGHTS = ("*.safetensors",)
_IGNORED_FILES = ("*/*", "consolidated*", "*.bin.index.json")


@dataclass(frozen=True)
class Fetched:
    """A model that is here.

    Attributes:
        folder: where it is.
        commit: which of the hub's it is.
        downloaded_bytes: that were not here before.
    """

    folder: Path
    commit: str
    downloaded_bytes: int = 0


def fetch(hub_id: str, revision: str | None, *, weights: bool, events: Events, ways: str) -> Fetched:
    """Bring a model here, or what is missing of it.

    Args:
        revision: a branch, a tag or a commit; None for the newest.
        weights: whether its weights are needed too.
        ways: what else the user can do, for the end of a refusal.

    Raises:
        ConfigError: one sentence: what the hub said, and what would work.
    """
    store = Store.of(hub_id)
    here = already_here(hub_id, revision, weights=weights)
    try:
        # A commit does not change, so there is nothing to ask.
        if here is not None and here.commit == revision:
            return here
        listing = _listing(hub_id, revision, weights)
        return _complete(listing, revision, store, events)
    except RefusedError as error:
        raise ConfigError.of("model.path", f"{error}; {ways}", hub_id) from None
    except UnreachableError as error:
        if here is not None:
            if not _offline():
                events.warning(f"the hub gave no answer ({error}); {hub_id} is taken as it was at {here.commit[:12]}")
            return here
        raise ConfigError.of("model.path", f"{_unreachable(error)}; {ways}", hub_id) from None


def refuse_absent(hub_id: str, revision: str | None, *, weights: bool, ways: str) -> None:
    """Refuse at once a model that is not here and cannot come, and one that the hub does not know.

    Raises:
        ConfigError: as `fetch`.
    """
    if already_here(hub_id, revision, weights=weights) is not None:
        return
    try:
        _listing(hub_id, revision, weights)
    except RefusedError as error:
        raise ConfigError.of("model.path", f"{error}; {ways}", hub_id) from None
    except UnreachableError as error:
        raise ConfigError.of("model.path", f"{_unreachable(error)}; {ways}", hub_id) from None


def already_here(hub_id: str, revision: str | None, *, weights: bool) -> Fetched | None:
    """What an earlier download left of a revision, if it is all that a start needs; asks nobody."""
    store = Store.of(hub_id)
    commit = store.commit(revision)
    folder = store.snapshot(commit) if commit else None
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        whole = not weights or bool(find_weight_files(folder))
    except CheckpointError:
        whole = False
    if not whole:
        return None
    return Fetched(folder, folder.name)


def _listing(hub_id: str, revision: str | None, weights: bool) -> Listing:
    if _offline():
        raise UnreachableError("HF_HUB_OFFLINE is set")
    return ask(hub_id, revision, (*SMALL_FILES, *(WEIGHTS if weights else ())), _IGNORED_FILES)


def _complete(listing: Listing, revision: str | None, store: Store, events: Events) -> Fetched:
    """Download what is missing; one process at a time, the next ones find it done."""
    if all(store.has(listing, file) for file in listing.files):
        with _writing(store):
            return Fetched(store.link(listing, revision), listing.commit)
    with _writing(store), _alone(store, events):
        missing = [file for file in listing.files if not store.has(listing, file)]
        size = sum(file.size for file in missing)
        _refuse_without_room(listing, missing, store)
        events.info(
            f"downloading {listing.hub_id} at {listing.commit[:12]}: {len(missing)} files, {format_size(size)}, "
            f"to {store.folder}"
        )
        with events.progress("download", size, "B") as progress:
            telling = Telling(events, progress, size)
            download(listing, missing, store, telling)
        telling.end()
        return Fetched(store.link(listing, revision), listing.commit, size)


@contextmanager
def _alone(store: Store, events: Events) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(store.lock)
    store.folder.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        events.info(f"waiting for another process that downloads to {store.folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writing(store: Store) -> Iterator[None]:
    """
    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError.of(
            "model.path",
            f"{store.folder} cannot be written ({error.strerror or error}); set HF_HOME to a folder that can",
            store.folder.name.removeprefix("models--").replace("--", "/", 1),
        ) from error


def _refuse_without_room(listing: Listing, missing: Sequence[RemoteFile], store: Store) -> None:
    parts = (store.part(file) for file in missing)
    wanted = sum(file.size for file in missing) - sum(part.stat().st_size for part in parts if part.is_file())
    free = shutil.disk_usage(store.folder).free
    if wanted > free:
        raise ConfigError.of(
            "model.path",
            f"{format_size(wanted)} are to be downloaded to {store.folder}, and {format_size(free)} are free; set "
            "HF_HOME to a folder with more room",
            listing.hub_id,
        )


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _unreachable(error: UnreachableError) -> str:
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    # It may hold a login.
    hub = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
    why = str(error) if _offline() else f"{hub}: {error}; HF_ENDPOINT names another hub"
    return f"there is no such folder, no earlier download of it, and the hub's model could not be fetched ({why})"
