"""What a hub says of a model: one request, with a limit of time, and refusals in the user's words."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError

TIMEOUT_S = 10.0
"""To connect, and to wait for the next bytes."""

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NAME = re.compile(r"[\w.-]+")


class UnreachableError(Exception):
    """The hub gave no answer, or none that makes sense; says why."""


class RefusedError(Exception):
    """The hub knows of no such model for this user; says why and what to do."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a model.

    Attributes:
        digest: what its content hashes to: SHA-256 for a large file, git's hash of a blob for a small one.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """A model at one commit, and those of its files that were asked for."""

    hub_id: str
    commit: str
    files: tuple[RemoteFile, ...]


def ask(hub_id: str, revision: str | None, wanted: Sequence[str], unwanted: Sequence[str]) -> Listing:
    """The model's newest commit, or that of `revision` (a branch, a tag or a commit).

    Args:
        wanted, unwanted: patterns of names, as in a shell.

    Raises:
        ConfigError: there is no such revision.
        RefusedError, UnreachableError: as their names say.
    """
    found = _info(hub_id, revision)
    files = tuple(_file(each) for each in found.siblings or () if _matches(each.rfilename, wanted, unwanted))
    if not _HASH.fullmatch(found.sha or "") or not files:
        raise UnreachableError("its answer names no commit or no files of a model")
    return Listing(hub_id, found.sha, files)


def _info(hub_id: str, revision: str | None) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    except GatedRepoError:
        raise RefusedError(
            "the hub asks for a licence and a login first; accept it there and run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise ConfigError.of("model.revision", f"the hub's {hub_id} has no such revision", revision) from None
    except RepositoryNotFoundError:
        raise RefusedError("there is no such folder, and the hub knows no such model, or not for this login") from None
    except HfHubHTTPError as error:
        raise for_status(error.response.status_code) from None
    # Whatever the HTTP library of the day raises when nothing, or something that is no answer, comes back.
    except Exception as error:
        raise UnreachableError(type(error).__name__) from error


def for_status(status: int) -> Exception:
    """What a status that is an error means, as an error to raise."""
    if status in (401, 403):
        return RefusedError(
            f"the hub refused the login ({status}); set HF_TOKEN to a token that may read it, or run `hf auth login`"
        )
    return UnreachableError(f"HTTP {status}")


def _file(found: Any) -> RemoteFile:
    digest = found.lfs.sha256 if found.lfs is not None else found.blob_id
    # Both become names of files here.
    if not _NAME.fullmatch(found.rfilename) or not _HASH.fullmatch(digest or "") or not isinstance(found.size, int):
        raise UnreachableError(f"its answer has no size or no hash for {found.rfilename}")
    return RemoteFile(found.rfilename, found.size, digest)


def _matches(name: str, wanted: Sequence[str], unwanted: Sequence[str]) -> bool:
    def any_of(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    return any_of(wanted) and not any_of(unwanted)
