"""What holds for all tests."""

from hypothesis import settings

# A slow machine is no failure: nothing here is a timed test.
settings.register_profile("kinlog", deadline=None, print_blob=True)
settings.load_profile("kinlog")
