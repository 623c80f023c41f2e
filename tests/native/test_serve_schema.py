"""The served description against the server that serves it: requests made up from it get replies that it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from lever.server.app import ELSEWHERE
from lever.server.openapi import OPERATIONS
from tests.serving import Serving, serving
from tests.tiny import tiny_model

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 8  # of each operation


def routes_of(served: Serving) -> list[Route]:
    app: Any = served.server.config.app
    return [route for route in app.routes if isinstance(route, Route)]


def test_every_route_is_described(tmp_path: Path) -> None:
    with serving(tiny_model(tmp_path / "qwen2.gguf", arch="qwen2")) as served:
        routes = {route.path.replace(":path", "") for route in routes_of(served)}

    assert routes - set(ELSEWHERE) == {operation.path for operation in OPERATIONS}


def test_no_request_from_the_description_breaks_its_promises(tmp_path: Path) -> None:
    with serving(tiny_model(tmp_path / "qwen2.gguf", arch="qwen2", context_length=64)) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        asked = []
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()
            asked.append(operation.label)

            @hypothesis.settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy())
            def keeps_its_promise(case: Any) -> None:
                response = case.call(timeout=60)
                checks = [check for check in CHECKS if response.status_code != 501 or check is not not_a_server_error]
                case.validate_response(response, checks=checks)

            keeps_its_promise()

        others = [op for op in OPERATIONS if op.path != "/openapi.json"]  # which it leaves out
        assert set(asked) == {f"{op.method.upper()} {op.path}" for op in others}
        assert served.chat(max_tokens=2).status == 200
