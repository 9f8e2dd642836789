"""What a run leaves behind: `run.json`, schema version 1. Bytes are integers; times are seconds on the run's clock."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
FILE_NAME = "run.json"

_SECRETS = (
    (re.compile(r"//[^/\s\"]+@"), "//***@"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_***"),
)
"""What a secret looks like, and what is written instead: credentials in an address, a token of the hub."""


class Record(BaseModel):
    """Base of the records: closed, so that a misspelt field is an error and not a lost measurement."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Span(Record):
    """A named interval. `beside` names what it ran beside, if anything."""

    name: str
    start_s: float
    wall_s: float
    beside: str | None = None


class ImportRecord(Record):
    """Seconds that a package's own modules took to import; what they pulled in of others counts for those.

    `parts` are the slow ones of the packages in it, as `torch._dynamo`.
    """

    package: str
    s: float
    parts: list[ImportRecord] = Field(default_factory=list)


class ImportServerRecord(Record):
    """The process that had imported everything before it was forked for this start, in `import_s` seconds of its own.

    `request_s` is when the fork came, on the run's clock, whose zero is the start of the process that asked for it.
    """

    pid: int
    started_at: str
    import_s: float
    request_s: float


class ErrorRecord(Record):
    """What went wrong: the class of the error, its sentence, and what the code says next to it, if anything."""

    type: str
    message: str
    traceback: str | None = None


class MemoryRecord(Record):
    """A reading before or after a stage."""

    ours_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    free_bytes: int


class StageMemory(Record):
    """Readings around a stage, the most that live tensors rose above the start of its worst part, and that part."""

    before: MemoryRecord | None = None
    after: MemoryRecord | None = None
    peak_bytes: int | None = None
    peak_part: str | None = None


class StageRecord(Record):
    """One stage of the pipeline, whether it ran or not."""

    slot: str
    use: str
    origin: str
    status: Literal["ok", "failed", "not_run", "skipped", "interrupted"] = "not_run"
    start_s: float | None = None
    wall_s: float | None = None
    spans: list[Span] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    memory: StageMemory = Field(default_factory=StageMemory)
    error: ErrorRecord | None = None


class LedgerRecord(Record):
    total_bytes: int
    requested_bytes: int
    source: str
    source_reason: str = ""
    accounts: dict[str, int]
    other_processes_bytes: int
    residual_bytes: int
    unused_bytes: int = 0
    held_bytes: int = 0
    peak_held_bytes: int


class KVCacheRecord(Record):
    """Blocks that requests can use; the padding block is one more."""

    num_gpu_blocks: int
    block_size: int
    bytes_per_block: int
    bytes: int
    num_tokens: int
    max_concurrency: float
    limited_by: str = ""


class ProvenanceRecord(Record):
    """What a run depends on besides its configuration, versions, device and the model's files.

    `sources` is a hash of the package's files, its configuration and the plugins of the checkout; `plugins` what brings
    each plugin that is not built in, with its version or a hash of its code; `environment` the variables that change
    what a start does, of those that were set.
    """

    sources: str
    plugins: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)


class RunRecord(Record):
    """A whole start."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    status: Literal["ok", "failed", "interrupted"] = "failed"
    started_at: str
    total_s: float = 0.0
    import_s: float = 0.0
    imports: list[ImportRecord] = Field(default_factory=list)
    import_server: ImportServerRecord | None = None
    ready_s: float | None = None
    spans: list[Span] = Field(default_factory=list)
    overrides: list[str] = Field(default_factory=list)
    config: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str | None] = Field(default_factory=dict)
    provenance: ProvenanceRecord | None = None
    device: dict[str, Any] = Field(default_factory=dict)
    stages: list[StageRecord] = Field(default_factory=list)
    ledger: LedgerRecord | None = None
    kv_cache: KVCacheRecord | None = None
    plan: dict[str, Any] | None = None
    messages: list[str] = Field(default_factory=list)
    error: ErrorRecord | None = None


class _Version(BaseModel):
    schema_version: int


def redact(text: str) -> str:
    """`text` without credentials in addresses (`//user:password@host`) and without tokens of the hub."""
    for secret, instead in _SECRETS:
        text = secret.sub(instead, text)
    return text


def write_record(record: RunRecord, folder: Path) -> Path:
    """Write `run.json`, without secrets, so that a reader sees a whole file or none."""
    path = folder / FILE_NAME
    text = redact(record.model_dump_json(indent=1)) + "\n"
    descriptor, temporary = tempfile.mkstemp(prefix=".run-", suffix=".json", dir=folder)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
    return path


def read_record(folder: Path) -> RunRecord:
    """The record of a run folder, or of the path of a `run.json`.

    Raises:
        FileNotFoundError: no record there.
        ValueError: not a record, or of a schema that this version does not read.
    """
    path = folder / FILE_NAME if folder.is_dir() else folder
    data = path.read_bytes()
    # Before the rest, which another version may not even have.
    version = _Version.model_validate_json(data).schema_version
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema version {version}; this program reads version {SCHEMA_VERSION}")
    # Keys may be added without a new version.
    return RunRecord.model_validate_json(data, extra="ignore")
