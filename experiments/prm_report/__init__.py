"""The report of a process reward model: its measures beside the baselines', and ``prm_report.html``."""

from .build import build_prm_report
from .evaluate import evaluate_steps
from .evaluation import Evaluation
from .records import read_scores

__all__ = ["Evaluation", "build_prm_report", "evaluate_steps", "read_scores"]
