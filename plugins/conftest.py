"""The fixtures of the project's own tests."""

from tests.conftest import no_hub_and_a_cache_of_our_own, tiny_folder

__all__ = ["no_hub_and_a_cache_of_our_own", "tiny_folder"]
