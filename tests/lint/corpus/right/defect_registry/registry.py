# expect: none
_TABLE = {}


def register(kind, name):
    def deco(fn):
        if (kind, name) in _TABLE:
            raise KeyError(f"{kind}/{name} registered already")
        _TABLE[kind, name] = fn
        return fn
    return deco


def make(kind, name, **kwargs):
    return _TABLE[kind, name](**kwargs)
