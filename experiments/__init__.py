if __name__ != "apportion.experiments":
    raise ImportError("import apportion.experiments, not experiments")
