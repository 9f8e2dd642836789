"""`python -m orchestrator`: a start, a sweep of starts, or what the configuration would be."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import __version__
from orchestrator.arguments import Parser
from orchestrator.clock import Clock
from orchestrator.commands import ended
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.records import ImportServerRecord


def main(argv: Sequence[str], *, clock: Clock | None = None, import_server: ImportServerRecord | None = None) -> int:
    """Run the command line; the exit code.

    Args:
        clock: None for one that begins with this process.
        import_server: the process that this one was forked from, if it was.
    """
    since = clock or Clock.since_process_start()
    return ended(lambda: _run(_parser().parse_intermixed_args(argv), since, import_server))


def _run(arguments: argparse.Namespace, clock: Clock, import_server: ImportServerRecord | None) -> int:
    if arguments.version:
        sys.stdout.write(f"orchestrator {__version__}\n")
        return 0
    overrides: list[str] = arguments.overrides
    if arguments.multirun or "hydra.mode=MULTIRUN" in overrides:
        from orchestrator.compose.sweep import sweep

        return sweep(overrides, arguments.config_dir, by_server=import_server is not None)
    flags = _flags_for_hydra(arguments)
    return _show(arguments, flags) if flags else _start(overrides, arguments.config_dir, clock, import_server)


def _start(
    overrides: list[str], config_dir: Path | None, clock: Clock, import_server: ImportServerRecord | None
) -> int:
    from orchestrator.compose.remembered import compose_or_recall
    from orchestrator.events import events_for
    from orchestrator.registry import Registry

    registry = Registry.discover()
    config = compose_or_recall(overrides, registry=registry, config_dir=config_dir, environment=os.environ).config

    from orchestrator import app

    events = events_for(json_lines=config.log.json_lines)
    outcome = app.run(
        config, overrides=overrides, events=events, clock=clock, registry=registry, import_server=import_server
    )
    outcome.cleanup.close()
    return outcome.exit_code


def _show(arguments: argparse.Namespace, flags: list[str]) -> int:
    """Leave it to Hydra, after what is wrong with the overrides has been said in our words."""
    from orchestrator.compose import draft_of, examine, read_all
    from orchestrator.compose.folders import ConfigFolders
    from orchestrator.compose.hydra_main import run_hydra
    from orchestrator.registry import Registry

    registry = Registry.discover()
    folders = ConfigFolders.find(registry, arguments.config_dir)
    if arguments.shell_completion or not (arguments.overrides or arguments.cfg):
        return run_hydra(flags, arguments.overrides, folders, lambda _: None)
    draft = draft_of(read_all(arguments.overrides), folders)
    problems = draft.problems if arguments.help or arguments.hydra_help else examine(draft, registry)[1]
    if problems:
        raise ConfigError(problems)
    return run_hydra(flags, [each.spelled for each in draft.used], folders, lambda _: None)


def _flags_for_hydra(arguments: argparse.Namespace) -> list[str]:
    switches = ("help", "hydra_help", "shell_completion")
    flags = [f"--{name.replace('_', '-')}" for name in switches if getattr(arguments, name)]
    flags += [f"--{name}={value}" for name in ("cfg", "info") if (value := getattr(arguments, name)) is not None]
    if len(flags) > 1:
        raise ConfigError.of(" ".join(flags), "only one of these at a time")
    details = [f"--package={arguments.package}"] if arguments.package is not None else []
    details += ["--resolve"] if arguments.resolve else []
    if details and arguments.cfg is None and not arguments.help:
        raise ConfigError.of(" ".join(details), "goes with --cfg; write --cfg job")
    return flags + details


def _parser() -> argparse.ArgumentParser:
    """Hydra's flags, so that an override may stand before and after them."""
    parser = Parser(prog="python -m orchestrator", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in (
        ("--help", "-h"),
        ("--hydra-help",),
        ("--version",),
        ("--run", "-r"),
        ("--multirun", "-m"),
        ("--resolve",),
        ("--shell-completion", "-sc"),
    ):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", choices=("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"))
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd", type=Path)
    return parser


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    # The interpreter's last collections would walk over all that torch and transformers imported, for about a second.
    gc.freeze()
    sys.exit(exit_code)
