"""The read side: verifying logs and checkpoints, replaying them to a projection, planning and reporting recovery.

At the top is what its subjects build on: the projection, columns of a log, checkpoints, text. Each folder is one subject,
and most know no other.

Imports ``kinlog.schemas`` and ``kinlog.lineage``, and nothing of the training stack: everything here runs on a login
node. Nothing here writes to a run's directory.
"""
