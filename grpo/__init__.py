"""The GRPO core: group sampling, loss, trainer, checkpoints, diagnostics."""

if __name__ != "apportion.grpo":
    raise ImportError("import apportion.grpo, not grpo")
