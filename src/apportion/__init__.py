"""Apportion: credit assignment for reinforcement learning of language models.

Import what you need from the subpackages; nothing heavy is loaded here::

    from apportion.verifiers import Sample, Span, Verdict, Verifier
    from apportion.credit import Rollout, CreditBatch, Credit
"""

__version__ = "0.1.0"
