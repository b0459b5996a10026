"""The read side: verifying logs and checkpoints, replaying them to a projection, planning and reporting recovery.

Imports ``kinlog.schemas`` and ``kinlog.lineage``, and nothing of the training stack: everything here runs on a login
node. Nothing here writes to a run's directory.
"""
