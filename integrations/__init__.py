"""Adapters to other projects; nothing in Apportion imports them."""

if __name__ != "apportion.integrations":
    raise ImportError("import apportion.integrations, not integrations")
