"""`python -m orchestrator.registry`: the plugins there are, and the options of one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from orchestrator.errors import UnknownNameError, UserError
from orchestrator.registry import KINDS, PREFIX, Plugin, Registry
from orchestrator.validation import describe_field


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.registry",
        description="List every stage, engine, profiler, loader, attention backend and other plugin: group, name, "
        "origin and where it is. With NAME, also its options with their types and defaults.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a plugin, in whatever group; or module:Class, a stage")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        registry = Registry.discover()
        shown = [_entry(plugin) for plugin in registry.plugins()]
        if arguments.name is not None:
            shown = [{**_entry(plugin), **_details(registry, plugin)} for plugin in _named(registry, arguments.name)]
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    text = json.dumps(shown, indent=1) if arguments.json else _table(shown)
    sys.stdout.write(f"{text}\n")
    return 0


def _named(registry: Registry, name: str) -> list[Plugin]:
    found = [plugin for plugin in registry.plugins() if plugin.name == name and plugin.group != "conf"]
    if found:
        return found
    if ":" in name:
        return [Plugin("stages", name, name, "the command line")]
    raise UnknownNameError("plugin", name, {plugin.name for plugin in registry.plugins() if plugin.group != "conf"})


def _entry(plugin: Plugin) -> dict[str, Any]:
    where = plugin.value if plugin.root is None else f"{plugin.value} in {plugin.root}"
    return {"group": plugin.group, "name": plugin.name, "origin": plugin.origin, "where": where}


def _details(registry: Registry, plugin: Plugin) -> dict[str, Any]:
    found = registry.resolve(plugin.group, plugin.name)
    summary = (found.__doc__ or "").strip().partition("\n")[0]
    # A tracker is its own options.
    config = found if isinstance(found, type) and issubclass(found, BaseModel) else getattr(found, "Config", None)
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        return {"summary": summary, "options": []}
    options = [
        {"name": name, "type": describe_field(field), "required": field.is_required(), "default": _default(field)}
        for name, field in config.model_fields.items()
    ]
    return {"summary": summary, "options": options}


def _default(field: Any) -> Any:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return None
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _table(entries: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    keys = ("group", "name", "origin", "where")
    widths = {key: max(len(entry[key]) for entry in entries) for key in keys[:-1]}
    for entry in entries:
        lines.append("  ".join([*(entry[key].ljust(widths[key]) for key in keys[:-1]), entry["where"]]))
        if entry.get("summary"):
            lines.append(f"    {entry['summary']}")
        for option in entry.get("options", []):
            default = "required" if option["required"] else f"default {json.dumps(option['default'], default=str)}"
            lines.append(f"    {option['name']}: {option['type']}; {default}")
        if "options" in entry and not entry["options"]:
            lines.append(f"    no options (entry-point group {PREFIX}{entry['group']}, a {KINDS[entry['group']]})")
    return "\n".join(lines)
