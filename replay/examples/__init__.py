"""What each optimizer step was trained on, down to the tokens, and where two runs part in it.

Imports what is at the top of ``kinlog.replay``.
"""
