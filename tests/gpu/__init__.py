"""What needs a CUDA device: run by hand there, `python -m tests.gpu.run`; the records it leaves are checked in CI."""
