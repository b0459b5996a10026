"""Ray actors and their adapters: the data plane, generation engines, environments, the finalizer, the trainer.

Each adapter owns one dependency (only ``tq_native`` imports TransferQueue), and hides what is unsafe about it.
This package imports ``kinlog.schemas`` and ``kinlog.lineage``, never the controller, which reaches it by protocols.
"""
