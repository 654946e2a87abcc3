"""The parts of the server that extras bring, and what takes their place where they are not there."""

import ssl
from typing import TYPE_CHECKING

from phase0_request.checks import check_extras, has_extras
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine

if TYPE_CHECKING:
    import uvicorn

PACKAGE = "phase6_integration"


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """The context of all connections, if they are encrypted."""
    if settings.ssl_certfile is None:
        return None
    check_extras(PACKAGE, "ssl_certfile")
    from phase6_integration.extras.edge import tls

    return tls.tls_context(settings)


def server_config(
    engine: AsyncEngine, settings: ServerSettings, connections: float, linger: int, context: ssl.SSLContext | None
) -> "uvicorn.Config":
    """The application and how uvicorn serves it, with at most so many connections."""
    import uvicorn

    if has_extras(PACKAGE):
        from phase6_integration.app import create_app
        from phase6_integration.extras.edge.transport import transport_config

        app = create_app(engine, settings)
        more = {"ssl_context_factory": None if context is None else lambda *_: context}
        config = transport_config(app, settings, connections, timeout_graceful_shutdown=linger, **more)
    else:
        from phase6_integration.api.application import application

        app = application(engine, settings)
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=linger)
    app.state.server.tokenizers.start()
    return config


def flush() -> None:
    """Send what is still held back: the process ends."""
    if has_extras(PACKAGE):
        from phase6_integration.extras.observe import spans

        spans.flush()
