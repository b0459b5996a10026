"""Weights on their way to vLLM's processes: a file that others read, and that no kill leaves behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kinlog.workers.vllm_weights import WeightsFile, check_weights

WEIGHTS = {
    "layer.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),  # not contiguous
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
}


def test_another_reader_finds_every_tensor_under_its_name():
    with WeightsFile() as file:
        file.write(WEIGHTS)
        with safe_open(file.path, framework="pt") as read:
            assert set(read.keys()) == set(WEIGHTS)
            for name, tensor in WEIGHTS.items():
                assert read.get_tensor(name).dtype == tensor.dtype
                assert torch.equal(read.get_tensor(name), tensor)


def test_it_is_gone_after_the_block_whatever_happened_in_it():
    with pytest.raises(KeyError), WeightsFile() as file:
        file.write(WEIGHTS)
        path = Path(file.path)
        assert path.exists()
        raise KeyError
    assert not path.exists()


def test_a_kill_in_the_middle_leaves_no_file_anywhere():
    code = (
        "import os, signal, torch\n"
        "from kinlog.workers.vllm_weights import WeightsFile\n"
        "with WeightsFile() as file:\n"
        "    file.write({'weight': torch.zeros(1000)})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = set(os.listdir("/dev/shm"))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    new = set(os.listdir("/dev/shm")) - before
    # Other tests may have directories there meanwhile.
    assert not [name for name in new if "kinlog" in name and not name.startswith("kinlog-crash-")]


def test_weights_of_another_model_are_told_apart_by_name_and_shape():
    expected = {name: tensor.shape for name, tensor in WEIGHTS.items()}
    check_weights(WEIGHTS, expected)
    with pytest.raises(ValueError, match=r"differences in \['scalar'\]"):
        check_weights({name: tensor for name, tensor in WEIGHTS.items() if name != "scalar"}, expected)
    with pytest.raises(ValueError, match="differences in .*spare"):
        check_weights({**WEIGHTS, "spare": torch.zeros(1)}, expected)
    with pytest.raises(ValueError, match=r"half: expected shape \(2,\), found \(3,\)"):
        check_weights({**WEIGHTS, "half": torch.zeros(3)}, expected)
