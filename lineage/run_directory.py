"""Where the parts of a run live on disk."""

from pathlib import Path

__all__ = ["RunDirectory"]


class RunDirectory:
    """The layout of a run's directory.

    ::

        log/            the event log
        journal/        the row journal: staged tokens that are not durable elsewhere yet
        progress/       the progress journal: tokens of rollouts that have not ended
        checkpoints/    one directory each
        trash/          what was pruned, until it is removed
        tensorboard/    metrics, where they are switched on
        resolved_config.yaml    the configuration of the run's first life, with every default
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def progress(self) -> Path:
        return self.path / "progress"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trash(self) -> Path:
        return self.path / "trash"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def config(self) -> Path:
        return self.path / "resolved_config.yaml"
