"""Settings of a server: frozen, checked when they are made, and silent about keys."""

from typing import Any

import pytest

from phase6_integration.api.settings import ServerSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("max_body_bytes", 0),
        ("max_headers", 0),
        ("max_choices", 0),
        ("max_messages", -1),
        ("max_logprobs", 21),
        ("keepalive", 0),
        ("send_timeout", float("nan")),
        ("receive_timeout", float("inf")),
        ("shutdown_timeout", -1),
        ("served_model_names", ()),
        ("served_model_names", ("a b",)),
        ("log_level", "loud"),
        ("log_format", "xml"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ServerSettings(**{field: value})


def test_settings_are_frozen_and_hide_their_keys() -> None:
    settings = ServerSettings(api_keys=("sk-hidden",))
    with pytest.raises(AttributeError):
        settings.port = 1  # type: ignore[misc]
    assert "sk-hidden" not in repr(settings)
