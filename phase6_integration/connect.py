"""Connects the extras of the server to its core, and has plain replacements where they are not installed."""

import math
import ssl
from dataclasses import fields
from typing import TYPE_CHECKING

from phase0_request.support.checks import check_extras, has_extras
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine

if TYPE_CHECKING:
    import uvicorn

PACKAGE = "phase6_integration"


# What the core's server does. Other settings are for extras.
CORE = {
    "host", "port", "uds", "root_path", "served_model_names", "allowed_hosts", "clip_max_tokens", "max_choices",
    "allow_unknown_fields", "request_timeout", "generation_config", "override_generation_config", "sampling_defaults",
    "chat_template", "keepalive", "idle_timeout", "shutdown_timeout", "log_level", "log_format",
}  # fmt: skip


def check_settings(settings: ServerSettings) -> None:
    """ConfigError if a setting is for an extra that is not installed."""
    if not has_extras(PACKAGE):
        default = ServerSettings()
        for field in fields(ServerSettings):
            if field.name not in CORE and getattr(settings, field.name) != getattr(default, field.name):
                check_extras(PACKAGE, field.name)


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """The context of all connections, if they are encrypted."""
    if settings.ssl_certfile is None:
        return None
    from phase6_integration.extras.edge import tls

    return tls.tls_context(settings)


def server_config(
    engine: AsyncEngine, settings: ServerSettings, connections: float, linger: int, context: ssl.SSLContext | None
) -> "uvicorn.Config":
    """The application and how uvicorn serves it, with at most `connections` connections."""
    import uvicorn

    if has_extras(PACKAGE):
        from phase6_integration.app import create_app
        from phase6_integration.extras.edge.transport import transport_config

        app = create_app(engine, settings)
        more = {"ssl_context_factory": None if context is None else lambda *_: context}
        config = transport_config(app, settings, connections, timeout_graceful_shutdown=linger, **more)
    else:
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        from phase6_integration.api.application import application

        hosts = [Middleware(TrustedHostMiddleware, allowed_hosts=[*settings.allowed_hosts, "127.0.0.1", "[::1]"])]
        app = application(engine, settings, hosts if settings.allowed_hosts else ())
        app.state.server.advice = lambda name: f"; {PACKAGE}/extras, which has more of them, is not here"
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=None if connections == math.inf else int(connections),
            timeout_keep_alive=round(settings.idle_timeout),
            timeout_graceful_shutdown=linger,
        )
    app.state.server.tokenizers.start()
    return config


def flush() -> None:
    """Send buffered spans before the process ends."""
    if has_extras(PACKAGE):
        from phase6_integration.extras.observe import spans

        spans.flush()
