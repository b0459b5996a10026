"""Making torch repeat itself, bit for bit, on the same machine and build."""

import os

import torch

__all__ = ["be_deterministic"]


def be_deterministic() -> None:
    """Have this process refuse operations that may give another result each time: they raise ``RuntimeError``.

    On the CPU results also depend on the number of threads, which trainer and engine pin themselves.
    """
    # Read when CUDA is initialised. Without it cuBLAS is not deterministic, and torch refuses matrix products there.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
