"""The story of one group, in plain sentences.

Imports what is at the top of ``kinlog.replay``.
"""
