"""Imports that a server leaves out: 40 MB and a third of a second for trainers and object detectors alone."""

import importlib.util
import sys


def leave_out_what_no_server_needs() -> None:
    """Call before torch, transformers or hivemind are imported, in a process that is a server and nothing else.

    transformers imports scipy.optimize for the losses of object detectors wherever scipy is installed, and hivemind's
    package imports all of its training half, scipy with it, before any of its parts.
    """
    import transformers.utils  # noqa: PLC0415

    transformers.utils.is_scipy_available = lambda: False  # type: ignore[attr-defined]
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None
    sys.modules.setdefault("hivemind", importlib.util.module_from_spec(spec))  # its parts are found, it is not run
