"""A log that is being written: followed as it grows, and how the run stands meanwhile.

Imports what is at the top of ``kinlog.replay``.
"""
