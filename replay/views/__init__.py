"""A log as tables, for SQL, Parquet, JSON Lines and any other Arrow tool.

``catalogue`` says which there are, ``reading`` reads them, in one pass and only what is asked for. Imports what is at the top
of ``kinlog.replay``.
"""
