"""The OpenAPI document of the console's JSON, made from the table of endpoints."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from pydantic import BaseModel, TypeAdapter

from qmq.version import VERSION

_REFERENCES: Final = "#/components/schemas/{model}"
_ERRORS: Final = {
    "400": "a value is wrong",
    "401": "no sign-in, or a token that holds no more",
    "403": "the token may not do this, or the change lacks its CSRF token",
    "404": "there is no such thing",
    "409": "the count or name that was typed is not that of now; nothing was done",
    "503": "no broker answers",
}


class Described(Protocol):
    """The parts of an endpoint that its description needs."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def run(self) -> Callable[[Any, Any], Awaitable[Any]]: ...
    @property
    def asked(self) -> type[BaseModel]: ...
    @property
    def answer(self) -> Any: ...
    @property
    def needs(self) -> str | None: ...


def document(endpoints: Sequence[Described]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of some endpoints."""
    schemas: dict[str, Any] = {
        "Error": {
            "type": "object",
            "required": ["error", "message"],
            "properties": {"error": {"type": "string"}, "message": {"type": "string"}},
        }
    }
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "QMQ console", "version": VERSION},
        "security": [{"token": []}, {"cookie": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "a token of the broker, NAME:SECRET"},
                "cookie": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "qmq",
                    "description": "of POST /sign-in; by TLS __Host-qmq",
                },
            },
        },
    }


def _operation(endpoint: Described, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", endpoint.path)
    ]
    operation: dict[str, Any] = {
        "operationId": endpoint.run.__name__,
        "summary": (endpoint.run.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "done", "content": _content(_schema(endpoint.answer, schemas, "serialization"))},
            **{
                status: {"description": text, "content": _content({"$ref": _REFERENCES.format(model="Error")})}
                for status, text in _ERRORS.items()
            },
        },
    }
    asked = _schema(endpoint.asked, schemas, "validation")
    fields = schemas[endpoint.asked.__name__]
    if endpoint.method == "GET":
        required = fields.get("required", ())
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": schema}
            for name, schema in fields.get("properties", {}).items()
        ]
    else:
        operation["requestBody"] = {"content": _content(asked)}
        operation["description"] = f"Needs the right: {endpoint.needs}."
        parameters.append(
            {
                "name": "X-CSRF-Token",
                "in": "header",
                "required": False,
                "schema": {"type": "string"},
                "description": "csrf of GET /api/session; not with a token of its own",
            }
        )
    operation["parameters"] = parameters
    return operation


def _schema(kind: Any, schemas: dict[str, Any], mode: Any) -> dict[str, Any]:
    """Return the schema of a type; put the models in it into *schemas*."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    schema = adapter.json_schema(mode=mode, ref_template=_REFERENCES)
    schemas.update(schema.pop("$defs", {}))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        schemas[kind.__name__] = schema
        return {"$ref": _REFERENCES.format(model=kind.__name__)}
    return schema


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
