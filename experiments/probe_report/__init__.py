"""The page of a probe: whose credit is near the truth, on which tokens, and how good the evidence must be."""

from .build import build_probe_report

__all__ = ["build_probe_report"]
