"""The profiler for InternVL's tiles."""
