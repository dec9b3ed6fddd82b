"""Evidence about rollouts in, per-token advantages out. Strategies know no text."""

if __name__ != "apportion.credit":
    raise ImportError("import apportion.credit, not credit")

from .batch import Credit, CreditBatch, Rollout, collate
from .strategy import CreditStrategy, assign_credit

__all__ = ["Credit", "CreditBatch", "CreditStrategy", "Rollout", "assign_credit", "collate"]
