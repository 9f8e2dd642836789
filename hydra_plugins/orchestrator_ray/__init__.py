"""The launcher over Ray where Hydra looks for launchers; it takes none from another place."""

from orchestrator.compose.ray_launcher import RayLauncher as _RayLauncher


class RayLauncher(_RayLauncher):
    """`hydra/launcher=ray`."""
