"""Connects the extras of the server to its core, with plain replacements if they are not installed."""

import math
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phase0_request.support.checks import check_extras, has_extras
from phase0_request.support.options import joined
from phase6_integration.api.settings import API_KEYS, ServerSettings
from phase6_integration.process.async_engine import AsyncEngine

if TYPE_CHECKING:
    from argparse import _ActionsContainer

    import uvicorn
    from fastapi import FastAPI

PACKAGE = "phase6_integration"
LINGER = 5  # seconds for responses to reach their clients, once all requests have ended


# Settings.


def extra_settings() -> list[type]:
    """The dataclasses of settings of the extras."""
    if not has_extras(PACKAGE):
        return []
    from phase6_integration.extras.edge.edge_settings import EdgeSettings
    from phase6_integration.extras.fields.field_settings import FieldSettings
    from phase6_integration.extras.observe.span_settings import SpanSettings
    from phase6_integration.extras.page.page_settings import PageSettings
    from phase6_integration.extras.tools.tool_settings import ToolSettings

    return [EdgeSettings, FieldSettings, ToolSettings, PageSettings, SpanSettings]


def settings(**given: Any) -> ServerSettings:
    """The settings of the server and of its extras, by their names. ValueError if one is wrong."""
    return joined(ServerSettings, extra_settings(), given)


def add_key_flag(group: "_ActionsContainer") -> None:
    if has_extras(PACKAGE):
        from phase6_integration.extras.edge import edge_settings

        edge_settings.add_key_flag(group)


def key_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> Mapping[str, Any]:
    """The setting of API keys. ConfigError if there are keys but no extra that asks clients for one."""
    if has_extras(PACKAGE):
        from phase6_integration.extras.edge.edge_settings import keys_of

        return {"api_keys": keys_of(given, environment)}
    for name in API_KEYS:
        if environment.get(name):
            check_extras(PACKAGE, name)
    return {}


# The server.


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """The TLS context of all connections, if they are encrypted. ConfigError if a file cannot be used."""
    if not has_extras(PACKAGE):
        return None
    from phase6_integration.extras.edge.edge_settings import EdgeSettings
    from phase6_integration.extras.edge.tls import tls_context

    edge = settings.of(EdgeSettings)
    return None if edge.ssl_certfile is None else tls_context(edge)


def server_config(
    app: "FastAPI", settings: ServerSettings, connections: float = math.inf, context: ssl.SSLContext | None = None
) -> "uvicorn.Config":
    """uvicorn's configuration for an application, with a limit on connections."""
    import uvicorn

    more: Mapping[str, Any] = {"limit_concurrency": None if connections == math.inf else int(connections)}
    if has_extras(PACKAGE):
        from phase6_integration.extras.edge.transport import transport

        more = transport(settings, connections)
    if context is not None:
        more = {**more, "ssl_context_factory": lambda *_: context}
    return uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=round(settings.idle_timeout),
        timeout_graceful_shutdown=LINGER,
        **more,
    )


def create_app(engine: AsyncEngine, settings: ServerSettings) -> "FastAPI":
    """The application with all installed extras."""
    if has_extras(PACKAGE):
        from phase6_integration.app import create_app

        return create_app(engine, settings)
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from phase6_integration.api.application import BodyLimit, application

    hosts = [Middleware(TrustedHostMiddleware, allowed_hosts=[*settings.allowed_hosts, "127.0.0.1", "[::1]"])]
    limit = Middleware(BodyLimit, most=settings.max_body_bytes)
    app = application(engine, settings, hosts if settings.allowed_hosts else (), [limit])
    app.state.server.advice = lambda name: f"; {PACKAGE}/extras, which has more of them, is not here"
    return app


def flush() -> None:
    """Send buffered spans before the process ends."""
    if has_extras(PACKAGE):
        from phase6_integration.extras.observe import spans

        spans.flush()
