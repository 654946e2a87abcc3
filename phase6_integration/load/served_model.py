"""first_model: the model that a server names first, as a client finds it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx


def first_model(response: "httpx.Response") -> str:
    """The first model in the response of GET /v1/models. ValueError if there is none."""
    try:
        content = response.json()
        if response.status_code == 200:
            return str(content["data"][0]["id"])
        message = content["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = "no model is listed at /v1/models"
    raise ValueError(f"{response.url} answered {response.status_code}: {message}")
