"""Whether a log and its checkpoints can be trusted, what to do where not, and what can be saved of a damaged one.

Imports what is at the top of ``kinlog.replay``, and of ``recovery`` the report. A damaged log is never changed: what is
saved of it is a copy.
"""
