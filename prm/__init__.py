"""Process reward models: step labels, training, one-pass scoring, honest evaluation."""

if __name__ != "apportion.prm":
    raise ImportError("import apportion.prm, not prm")

from .steps import StepExample

__all__ = ["StepExample"]
