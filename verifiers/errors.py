"""Errors that a user can act on: shown as one line, without a traceback."""

__all__ = ["InputError"]


class InputError(ValueError):
    """Bad input. The message names the key, file or row at fault and says how to mend it."""
