"""As much of a hub as a download needs, in a process of its own: `python -m tests.hub_server FOLDER LOG [options]`.

FOLDER/org/name holds the files of a model. The port is the first line of stdout; LOG gets a line of JSON a request: its
path, the byte from which on it asked, and the bytes that it was sent.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()
REVISIONS = ("main", "v1", COMMIT)
_CHUNK = 1 << 14
_LARGE = 1 << 16


class Hub(ThreadingHTTPServer):
    """One folder of models, and how it misbehaves."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.options = options
        self._door = threading.Lock()
        self._broken = 0

    def log(self, path: str, start: int, sent: int) -> None:
        with self._door, self.options.log.open("a") as file:
            file.write(json.dumps({"path": path, "start": start, "sent": sent}) + "\n")

    def breaks(self) -> bool:
        """Whether this transfer is one of those that end early."""
        with self._door:
            self._broken += 1
            return self._broken <= int(self.options.broken)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return None

    def do_GET(self) -> None:
        options = self.server.options
        path = unquote(urlsplit(self.path).path).strip("/")
        if options.silent:
            time.sleep(3600)
        if options.token and self.headers.get("Authorization") != f"Bearer {options.token}":
            self._refuse(401, message="Invalid credentials in Authorization header")
        elif path.startswith("api/models/"):
            self._list(path.removeprefix("api/models/").split("/"))
        elif path.count("/resolve/") == 1:
            model, _, rest = path.partition("/resolve/")
            revision, _, file = rest.partition("/")
            self._send(options.folder / model / file, path, revision)
        else:
            self._refuse(404)

    def _list(self, parts: list[str]) -> None:
        folder = self.server.options.folder.joinpath(*parts[:2])
        self.server.log("/".join(parts), 0, 0)
        if self.server.options.gated:
            self._refuse(403, code="GatedRepo")
        elif not folder.is_dir():
            self._refuse(401 if not self.headers.get("Authorization") else 404, code="RepoNotFound")
        elif parts[2:] and parts[3] not in REVISIONS:
            self._refuse(404, code="RevisionNotFound")
        else:
            self._json({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": [*map(_entry, sorted(folder.iterdir()))]})

    def _send(self, file: Path, path: str, revision: str) -> None:
        if revision != COMMIT or not file.is_file():
            self._refuse(404, code="EntryNotFound")
            return
        data, start = file.read_bytes(), self._start()
        if self.server.options.garbled:
            data = bytes(byte ^ 1 for byte in data)
        if start >= len(data):
            self._refuse(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        sent = self._write(data[start:], len(data) > _LARGE and self.server.breaks())
        self.server.log(path, start, sent)

    def _start(self) -> int:
        wanted = self.headers.get("Range")
        if not wanted or self.server.options.whole:
            return 0
        return int(wanted.removeprefix("bytes=").partition("-")[0])

    def _write(self, data: bytes, broken: bool) -> int:
        """Bytes that went out; a broken transfer ends in the middle, a slow one takes its time."""
        stop = len(data) // 2 if broken else len(data)
        sent = 0
        try:
            for at in range(0, stop, _CHUNK):
                sent += self.wfile.write(data[at : min(at + _CHUNK, stop)])
                if self.server.options.rate:
                    time.sleep(_CHUNK / self.server.options.rate)
        except OSError:
            pass
        self.close_connection = sent < len(data)
        return sent

    def _refuse(self, status: int, code: str | None = None, message: str | None = None) -> None:
        self.send_response(status)
        for name, value in (("X-Error-Code", code), ("X-Error-Message", message)):
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _entry(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    entry: dict[str, Any] = {
        "rfilename": file.name,
        "size": len(data),
        "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
    }
    if len(data) > _LARGE:
        entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
    return entry


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--token", help="the only one that is let in")
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--silent", action="store_true", help="never answer")
    parser.add_argument("--whole", action="store_true", help="know no ranges")
    parser.add_argument("--garbled", action="store_true", help="send other bytes than announced")
    parser.add_argument("--broken", type=int, default=0, help="transfers of large files that end in the middle")
    parser.add_argument("--rate", type=int, default=0, help="bytes a second of a transfer")
    hub = Hub(parser.parse_args())
    print(hub.server_address[1], flush=True)  # noqa: T201
    hub.serve_forever()


if __name__ == "__main__":
    main()
