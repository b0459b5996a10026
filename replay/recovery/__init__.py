"""What a restart does: where it begins, what it keeps, redoes, drops and clears, and the report of it.

Pure decisions, of the projection and the data plane's inventory: the controller carries them out, ``kinlog plan`` only shows
them. Imports what is at the top of ``kinlog.replay``.
"""
