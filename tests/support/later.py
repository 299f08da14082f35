"""Modules that are imported when a test first uses them, not by each process that collects tests."""

import importlib.util
import sys
from types import ModuleType


def later(name: str) -> ModuleType:
    """Return a module that is loaded when an attribute of it is first read. Raises ModuleNotFoundError at once."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
