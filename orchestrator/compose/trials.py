"""The database that a search keeps its trials in, if it has one."""

from __future__ import annotations

from typing import Any

from orchestrator.compose.tree import first_line
from orchestrator.errors import ConfigError
from orchestrator.records import redact

_KEY = "hydra.sweeper.storage"


def make_ready(storage: Any) -> None:
    """Write into a new database what Optuna expects to find there.

    Optuna itself does not get that far with SQLAlchemy 2: it writes the version of its tables on a connection that it
    never commits, which was enough before; the rest of what it does works with both.

    Raises:
        ConfigError: the database cannot be used.
    """
    if not isinstance(storage, str) or not storage or storage.startswith("redis"):
        return
    from optuna.storages import RDBStorage

    try:
        RDBStorage(storage, engine_kwargs={"isolation_level": "AUTOCOMMIT"}).engine.dispose()
    except Exception as error:
        what = first_line(str(error)) or type(error).__name__
        raise ConfigError.of(_KEY, f"cannot be used: {redact(what)}", redact(storage)) from None
