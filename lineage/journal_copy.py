"""Copying segments of the row journal: what makes a rollout checkpoint self-contained."""

from pathlib import Path

from kinlog.lineage.journal import ScannedJournal
from kinlog.lineage.store import Store, write_durably

__all__ = ["copy_journal_segment"]


def copy_journal_segment(store: Store, journal: ScannedJournal, target: Path) -> None:
    """Make ``target``, a directory, hold what is verified of a segment that its worker may still append to.

    One that was ended does not change any more, and is hard-linked. Of any other the copy has no end mark, as what a
    killed worker leaves.
    """
    if journal.closed:
        store.link(journal.path, target / journal.path.name)
    elif journal.scan.frames:
        content = bytes(journal.data[: journal.scan.frames[-1].end])
        write_durably(store, target / journal.path.name, content)
