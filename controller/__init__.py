"""The running controller."""
