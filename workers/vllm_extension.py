"""What vLLM's own processes do for kinlog: take weights, and end with the generation worker that they belong to.

vLLM imports this module, by name, in each process that runs the model, before it loads anything.
"""

import os
import select
import signal
import threading
from collections.abc import Callable

from safetensors import safe_open

__all__ = ["OWNER_VARIABLE", "EXTENSION_CLASS", "WeightsExtension"]

#: Environment variable with the process id of the generation worker, inherited by all that vLLM starts.
OWNER_VARIABLE = "KINLOG_ENGINE_OWNER"

EXTENSION_CLASS = "kinlog.workers.vllm_extension.WeightsExtension"


class WeightsExtension:
    """Mixed into vLLM's worker class, so that its methods can be called by name in every process that has a shard."""

    reload_weights: Callable[..., None]
    """vLLM's own: merges what it keeps merged, takes this process's shard, and lays it out as its kernels want it."""

    def load_kinlog_weights(self, path: str) -> None:
        """Load parameters under their Hugging Face names from a safetensors file."""
        with safe_open(path, framework="pt") as file:
            self.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118


def _end_with(owner: int) -> None:
    """Kill this process as soon as another has ended, however it ended.

    vLLM's engine process does not notice by itself that the one that started it was killed: it would wait for requests
    for ever, with the accelerator's memory.
    """
    try:
        ended = os.pidfd_open(owner)  # readable once the process has ended; its threads may come and go
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        select.select([ended], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="kinlog-engine-owner", daemon=True).start()


if OWNER_VARIABLE in os.environ:
    _end_with(int(os.environ[OWNER_VARIABLE]))
