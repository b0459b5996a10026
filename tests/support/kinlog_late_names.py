"""A directory on a network file system: names that another machine made show late, and exclusive creation knows better."""

from pathlib import Path

from kinlog.lineage.store import LocalStore


class LateNamesStore(LocalStore):
    """The local disk, where some names are out of sight for a number of looks at their directory."""

    def __init__(self, hidden: dict[str, int]) -> None:
        self.hidden = dict(hidden)
        """Name -> listings that it is still missing from."""
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)

    def names(self, directory: Path) -> list[str]:
        names = [name for name in super().names(directory) if not self.hidden.get(name)]
        self.hidden = {name: left - 1 for name, left in self.hidden.items() if left > 1}
        return names

    def exists(self, path: Path) -> bool:
        return not self.hidden.get(path.name) and super().exists(path)
