"""``python -m apportion.experiments.report DIR``."""

from . import main

main()
