"""What kinlog's parts say to each other: events, prompt references, receipts, configuration, manifests, errors.

Everything else imports from here; this package imports nothing of kinlog's, and only msgspec and pyarrow of others'.
Structs are frozen and carry no behaviour beyond what follows from their own fields.
"""
