"""A picture of a run: who ran which attempt when, and how it ended; as a page, and as a trace.

``building`` makes a ``Timeline`` in one pass over a log; all else is made from that. ``page/`` holds what the page consists
of. Imports what is at the top of ``kinlog.replay``, and the account of ``audit``.
"""
