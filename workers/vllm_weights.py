"""Handing weights to vLLM's processes: a safetensors file in memory, which nobody has to remove."""

import json
import os
from collections.abc import Mapping
from typing import Self

import torch

__all__ = ["check_weights", "WeightsFile"]

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def check_weights(state_dict: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are not the model's, before anything has been overwritten.

    Raises
    ------
    ValueError
        A parameter is missing, unknown, or of another shape.
    """
    if expected.keys() != state_dict.keys():
        difference = sorted(expected.keys() ^ state_dict.keys())
        raise ValueError(f"expected the model's parameters by name, found differences in {difference[:4]}")
    for name, shape in expected.items():
        if state_dict[name].shape != shape:
            raise ValueError(f"{name}: expected shape {tuple(shape)}, found {tuple(state_dict[name].shape)}")


class WeightsFile:
    """A safetensors file that has no name in any directory. A context manager: it is there for the length of the block.

    The kernel frees it when nobody has it open any more, and so also when this process is killed. A file in /dev/shm
    would stay, with the memory of a whole model.
    """

    def __enter__(self) -> Self:
        self._descriptor = os.memfd_create("kinlog-weights")
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """Where the other processes of this user and machine can read it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Fill it, a tensor at a time. Blocks: call it in a thread.

        safetensors' own writers need a name in a directory, or all of the file as one object.
        """
        header: dict[str, object] = {}
        end = 0
        for name, tensor in state_dict.items():
            begin, end = end, end + tensor.nbytes
            header[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        encoded = json.dumps(header).encode()
        with open(self._descriptor, "wb", closefd=False) as file:
            file.write(len(encoded).to_bytes(8, "little"))
            file.write(encoded)
            for tensor in state_dict.values():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
