"""The content of one file over HTTP, from any byte on, by the client that huggingface_hub is configured with."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from orchestrator.hub.listing import TIMEOUT_S, Listing, RefusedError, RemoteFile, UnreachableError, for_status

_CHUNK_BYTES = 256 << 10
"""What has not filled one is lost when a connection breaks."""
_WHOLE, _PART, _NO_SUCH_RANGE = 200, 206, 416


def stream(listing: Listing, file: RemoteFile, offset: int) -> Generator[tuple[int, bytes], None, None]:
    """Pieces of a file, each with the byte where it belongs; the first may lie before `offset`, if the hub sends all.

    Raises:
        RefusedError, UnreachableError: as their names say, before the first piece or after any.
    """
    try:
        yield from _pieces(listing, file, offset)
    except (RefusedError, UnreachableError):
        raise
    # Nothing else is done in there than HTTP, and its library has other names for its errors in other versions.
    except Exception as error:
        raise UnreachableError(type(error).__name__) from error


def _pieces(listing: Listing, file: RemoteFile, offset: int) -> Generator[tuple[int, bytes], None, None]:
    with _request(listing, file, offset) as response:
        if response.status_code == _NO_SUCH_RANGE and offset:
            yield from _pieces(listing, file, 0)
            return
        if response.status_code not in (_WHOLE, _PART):
            raise for_status(response.status_code)
        at = offset if response.status_code == _PART else 0
        for chunk in response.iter_bytes(_CHUNK_BYTES):
            yield at, chunk
            at += len(chunk)


def _request(listing: Listing, file: RemoteFile, offset: int) -> Any:
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    url = hf_hub_url(listing.hub_id, file.name, revision=listing.commit)
    return get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
