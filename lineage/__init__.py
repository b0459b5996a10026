"""The write side: the append-only log (frames, segments, group commit), and the ledger that decides, folds and appends.

Imports ``kinlog.schemas`` only, and is imported by everything else. ``fold`` is the one transition function, used live
and at replay; ``decide`` holds the pure decisions; ``store`` is the one seam for file operations.
"""
