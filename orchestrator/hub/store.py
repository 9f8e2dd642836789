"""The folder in which huggingface_hub keeps models: files by their hash, and a folder of links a commit.

The layout is the documented one (https://huggingface.co/docs/huggingface_hub/guides/manage-cache).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from orchestrator.hub.listing import Listing, RemoteFile

_DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class Store:
    """The part of the folder that belongs to one model."""

    folder: Path

    @classmethod
    def of(cls, hub_id: str) -> Store:
        from huggingface_hub import constants

        return cls(Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}")

    @property
    def lock(self) -> Path:
        return self.folder / ".download.lock"

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.digest

    def part(self, file: RemoteFile) -> Path:
        """Where a file grows until it is whole."""
        return self.folder / "blobs" / f"{file.digest}.part"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def has(self, listing: Listing, file: RemoteFile) -> bool:
        """Whether the file is there, by its hash or as a file that another program wrote for this commit."""
        return any(
            path.is_file() and path.stat().st_size == file.size
            for path in (self.blob(file), self.snapshot(listing.commit) / file.name)
        )

    def commit(self, revision: str | None) -> str | None:
        """The commit that a revision was when it was last asked for; None where it never was."""
        name = revision or _DEFAULT_REVISION
        reference = self.folder / "refs" / name
        if reference.is_file():
            return reference.read_text().strip()
        return name if self.snapshot(name).is_dir() else None

    def link(self, listing: Listing, revision: str | None) -> Path:
        """Give the commit its folder; only now, so that a folder which is there has all its files."""
        snapshot = self.snapshot(listing.commit)
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in listing.files:
            name = snapshot / file.name
            if not name.is_file() or name.stat().st_size != file.size:
                name.unlink(missing_ok=True)
                _link(self.blob(file), name)
        reference = self.folder / "refs" / (revision or _DEFAULT_REVISION)
        # What is as it should be is not written again: the folder may be another user's.
        if self.commit(revision) != listing.commit:
            reference.parent.mkdir(parents=True, exist_ok=True)
            temporary = reference.with_name(f".{reference.name}.{os.getpid()}")
            temporary.write_text(listing.commit)
            temporary.replace(reference)
        return snapshot


def _link(blob: Path, name: Path) -> None:
    try:
        name.symlink_to(os.path.relpath(blob, name.parent))
    except OSError:
        # A file system without links.
        shutil.move(blob, name)
