"""The workers' journals at checkpoints: what a rollout checkpoint takes of the row journal, and what is let go of once
everything in it is durable elsewhere, or gone."""

from pathlib import Path

from kinlog.lineage.journal import ROWS, Attempt, JournalKind, ScannedJournal, journal_attempts, scan_journal
from kinlog.lineage.journal_copy import copy_journal_segment
from kinlog.lineage.store import Store
from kinlog.schemas.errors import LogDamagedError, LogUnsupportedError

__all__ = ["JournalKeeper"]


class JournalKeeper:
    """Watches over one of a run's journal directories. Belongs to one life of the controller.

    Made before this life's workers: what is in the directory then belongs to processes that are dead.
    """

    def __init__(self, store: Store, directory: Path, trash: Path, kind: JournalKind = ROWS) -> None:
        self._store = store
        self._directory = directory
        self._kind = kind
        self._trash = trash
        self._of_the_dead = frozenset(filter(kind.owns, store.names(directory)))
        self._attempts: dict[str, frozenset[Attempt]] = {}

    def note_ended(self) -> None:
        """Look which segments will get no more rows. Blocks on the disk.

        This comes before it is decided what is needed: that decision knows nothing of attempts that begin after it, whose
        rows may end a segment a moment later.
        """
        for name in filter(self._kind.owns, self._store.names(self._directory)):
            if name not in self._attempts and (journal := self._scan(name)) is not None:
                self._attempts_of(journal)

    def drop_unneeded(self, needed: frozenset[Attempt]) -> list[str]:
        """Remove the segments that are known to have ended and hold no row of a needed attempt. Returns their names. Blocks
        on the disk.

        A segment that does not verify stays: it is for people to look at. So does one that a newer kinlog wrote.
        """
        unneeded = [
            name
            for name in self._store.names(self._directory)
            if name in self._attempts and needed.isdisjoint(self._attempts[name])
        ]
        if unneeded:
            self._remove(unneeded)
        return unneeded

    def drop_all(self) -> None:
        """Remove what is there of earlier lives, sound or damaged. Blocks on the disk."""
        names = sorted(self._of_the_dead & set(self._store.names(self._directory)))
        if names:
            self._remove(names)

    def copy_needed(self, target: Path, needed: frozenset[Attempt]) -> frozenset[Attempt]:
        """Make ``target`` a journal of the segments that hold rows of needed attempts. Returns the needed attempts that it
        has no row of. Blocks on the disk.

        Raises
        ------
        OSError
            The disk fails, or is full.
        """
        lacking = needed
        self._store.make_directory(target)
        for name in filter(self._kind.owns, self._store.names(self._directory)):
            known = self._attempts.get(name)
            if known is not None:
                # Nobody appends to it any more.
                if not needed.isdisjoint(known):
                    self._store.link(self._directory / name, target / name)
                    lacking -= known
                continue
            journal = self._scan(name)
            attempts = self._attempts_of(journal) if journal is not None else frozenset()
            if journal is not None and not needed.isdisjoint(attempts):
                copy_journal_segment(self._store, journal, target)
                lacking -= attempts
        self._store.sync_directory(target)
        return lacking

    def _scan(self, name: str) -> ScannedJournal | None:
        """Verify a segment; ``None`` when it is damaged, or of a newer kinlog."""
        for _ in range(2):  # one that is appended to may grow while it is read: damage is there to stay
            try:
                return scan_journal(self._store, self._directory / name)
            except LogDamagedError:
                continue
            except LogUnsupportedError:
                break
        return None

    def _attempts_of(self, journal: ScannedJournal) -> frozenset[Attempt]:
        """Return the attempts in a segment, and remember them if there will be no more."""
        attempts = journal_attempts(journal)
        name = journal.path.name
        if journal.closed or name in self._of_the_dead:
            self._attempts[name] = attempts
        return attempts

    def _remove(self, names: list[str]) -> None:
        """Rename away first, then remove: a half-removed segment never has a segment's name."""
        self._store.make_directory(self._trash)
        grave = self._trash / f"journal.{names[0]}"
        self._store.make_directory(grave)
        for name in names:
            self._store.rename(self._directory / name, grave / name)
            self._attempts.pop(name, None)
        self._store.sync_directory(self._directory)
        self._store.remove_tree(grave)
