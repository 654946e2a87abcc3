"""The application that tests put an engine behind: with all extras, or the core alone where they are absent."""

from importlib.util import find_spec

if find_spec("phase6_integration.extras") is not None:
    from phase6_integration.app import create_app
    from phase6_integration.extras.edge.transport import transport_config
else:
    import uvicorn

    from phase6_integration.api.application import application as create_app

    def transport_config(app, settings):
        return uvicorn.Config(app, lifespan="off", log_config=None)


__all__ = ["create_app", "transport_config"]
