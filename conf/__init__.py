if __name__ != "apportion.conf":
    raise ImportError("import apportion.conf, not conf")
