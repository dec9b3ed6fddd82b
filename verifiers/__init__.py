"""Text in, verdicts with character spans out. Nothing here knows tensors."""

if __name__ != "apportion.verifiers":
    raise ImportError("import apportion.verifiers, not verifiers")

from .errors import InputError
from .verdict import Reply, Sample, Span, Verdict, Verifier

__all__ = ["InputError", "Reply", "Sample", "Span", "Verdict", "Verifier"]
