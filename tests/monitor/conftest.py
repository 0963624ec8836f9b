"""What the tests of the live monitor need around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a slow machine the budget for log work would join windows; it is tested by itself."""
    import transformers

    from hfopt.monitor import session

    monkeypatch.setattr(session, "_GRACE_S", 60.0)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)
