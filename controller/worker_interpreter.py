"""The interpreter that generation workers run in, when it is not the run's own."""

import os
from pathlib import Path

from kinlog.schemas.errors import ConfigError
from kinlog.schemas.settings import GenerationSettings

__all__ = ["worker_interpreter"]


def worker_interpreter(settings: GenerationSettings) -> str | None:
    """Return its absolute path, ``None`` for the run's own.

    Raises
    ------
    ConfigError
        There is no such program: Ray would try to start workers with it for ever.
    """
    if settings.python is None:
        return None
    path = (
        Path(settings.python).expanduser().absolute()
    )  # links are kept: an environment's interpreter is one
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"generation.python: expected the path of a Python interpreter, found no program at {path}. Make the "
            "environment that it belongs to, or leave the key out to generate in the run's own."
        )
    return str(path)
