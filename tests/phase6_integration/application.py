"""The application that tests put an engine behind: with all wings, or the core alone where they have been taken off."""

from importlib.util import find_spec

if find_spec("phase6_integration.wings") is not None:
    from phase6_integration.app import create_app
    from phase6_integration.serve import ENGINE
    from phase6_integration.wings.describe.response_schemas import (
        ChatChunk,
        ChatResponse,
        CompletionChunk,
        CompletionResponse,
    )
    from phase6_integration.wings.edge.transport import transport_config
else:
    import json

    import uvicorn

    from phase6_integration.api.application import application as create_app
    from phase6_integration.process.async_engine import BUNDLED_ENGINE as ENGINE

    class Parsed(dict):
        """JSON without its schema. A field that is missing is None."""

        __getattr__ = dict.get

        @classmethod
        def model_validate_json(cls, content):
            return json.loads(content, object_hook=cls)

    ChatChunk = ChatResponse = CompletionChunk = CompletionResponse = Parsed

    def transport_config(app, settings):
        return uvicorn.Config(app, lifespan="off", log_config=None)


__all__ = [
    "ENGINE",
    "ChatChunk",
    "ChatResponse",
    "CompletionChunk",
    "CompletionResponse",
    "create_app",
    "transport_config",
]
