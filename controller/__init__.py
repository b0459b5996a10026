"""The running controller: barrier and cuts, samplers, pumps, checkpoints, recovery, supervision, the command line.

It imports ``kinlog.schemas``, ``kinlog.lineage`` and ``kinlog.replay``, and reaches workers through ``protocols`` only;
``launch`` is the one module that puts the real ones in. Importing this package imports nothing of the training stack.
"""
