"""A download in another process: `python -m tests.fetching HUB_ID [REVISION]` prints what was fetched, or why not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.errors import ConfigError
from orchestrator.events import Progress, TextEvents
from orchestrator.hub.fetch import fetch


class _Counting(TextEvents):
    """Adds up what the progress was told."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.total = self.advanced = 0

    @contextmanager
    def progress(self, label: str, total: int, unit: str) -> Iterator[Progress]:
        self.total = total
        yield self

    def advance(self, amount: int) -> None:
        self.advanced += amount


def main() -> None:
    hub_id, revision = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    events = _Counting()
    try:
        found = fetch(hub_id, revision, weights=True, events=events, ways="give a folder")
    except ConfigError as error:
        print(error)  # noqa: T201
        raise SystemExit(2) from None
    fields = {"folder": str(found.folder), "commit": found.commit, "downloaded": found.downloaded_bytes}
    print(json.dumps({**fields, "total": events.total, "advanced": events.advanced}))  # noqa: T201


if __name__ == "__main__":
    main()
