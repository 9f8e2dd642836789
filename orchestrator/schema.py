"""The JSON Schema of `run.json`: generated from the records, shipped with the package for programs in any language."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from orchestrator.records import SCHEMA_VERSION, RunRecord

FILE_NAME = "run.schema.json"


def generated() -> dict[str, Any]:
    """What the records of this version say. Open, because keys may be added without a new schema version."""
    schema = _opened(RunRecord.model_json_schema())
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION, "default": SCHEMA_VERSION}
    schema["description"] = f"run.json, schema version {SCHEMA_VERSION}: bytes are integers, times seconds on one clock"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def text_of(schema: dict[str, Any]) -> str:
    """As the file has it."""
    return json.dumps(schema, indent=1) + "\n"


def schema_text() -> str:
    """The file that this installation has."""
    return files("orchestrator").joinpath(FILE_NAME).read_text(encoding="utf-8")


def _opened(value: Any) -> Any:
    """Without the refusal of keys that are not known, which the records' own reader does not have either."""
    if isinstance(value, dict):
        return {
            key: _opened(item) for key, item in value.items() if not (key == "additionalProperties" and item is False)
        }
    return [_opened(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    import sys

    sys.stdout.write(text_of(generated()))
