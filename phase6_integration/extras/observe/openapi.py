"""/openapi.json: FastAPI describes the routes. This adds the bodies of requests, which routes parse themselves, and
the API key."""

from collections.abc import Collection, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"


def attach(app: FastAPI, bodies: Mapping[str, type[BaseModel]], public: Collection[str] | None) -> None:
    """Have the app describe its routes. `bodies`: the schemas of POST requests, by path; `public`: the paths that need
    no API key, or None if none does."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = describe()
            components = document["components"]
            models = [(model, "validation") for model in bodies.values()]
            _, schemas = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
            components["schemas"] |= schemas["$defs"]
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    if path in bodies and "requestBody" not in operation:
                        _add_body(operation, bodies[path])
                    if public is not None and path not in public:
                        operation["security"] = [{"key": []}]
            if public is not None:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_body(operation: dict[str, Any], model: type[BaseModel]) -> None:
    content = {"application/json": {"schema": {"$ref": REF.format(model=model.__name__)}}}
    operation["requestBody"] = {"required": True, "content": content}
    if "stream" in model.model_fields:
        operation["responses"]["200"]["content"][getattr(model, "stream_type", "text/event-stream")] = {}
