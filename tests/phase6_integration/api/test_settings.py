"""Settings of a server: frozen, checked when they are made, and silent about keys."""

import pytest

from phase6_integration.api.settings import ServerSettings


def test_settings_are_frozen_and_hide_their_keys() -> None:
    settings = ServerSettings(api_keys=("sk-hidden",))
    with pytest.raises(AttributeError):
        settings.port = 1  # type: ignore[misc]
    assert "sk-hidden" not in repr(settings)
