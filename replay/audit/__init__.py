"""What a run amounts to, counted from its log: nothing lost and nothing trained on twice, or which groups were; and how much
of everything there was.

The account knows nothing of the fold, so that the one proves the other. Imports what is at the top of ``kinlog.replay``.
"""
