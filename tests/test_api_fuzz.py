"""Whatever is asked within the published description, and beside it, is answered as it says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from llamactl_supervisor.models import EngineState
from sandbox import WITHIN_S
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tcp_box import ADMIN, TcpBox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemathesis import Case

CHECKS = [
    *(status_code_conformance, content_type_conformance),
    *(response_schema_conformance, response_headers_conformance),
]
EXAMPLES = 10
published = schemathesis.openapi.from_path(Path(__file__).parents[1] / "docs" / "openapi.json")
# `down` would end the daemon that the others ask.
api = published.exclude(path="/v1/down")


@pytest.fixture(scope="module")
def box() -> Iterator[TcpBox]:
    sandbox = TcpBox()
    sandbox.start()
    yield sandbox
    sandbox.close()


@pytest.fixture(autouse=True)
def engine(box: TcpBox) -> None:
    """Have the engine serve, whatever the last operation did to it."""
    if box.client.status().state is not EngineState.READY:
        box.client.wait_operation(box.client.stop(), timeout_s=WITHIN_S)
        box.up()


@api.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_described(case: Case[Any], box: TcpBox) -> None:
    if case.path == "/v1/logs":
        case.query["follow"] = "false"  # the other never ends
    headers = {"Authorization": f"Bearer {ADMIN}"}
    url = f"http://127.0.0.1:{box.api_port}"
    answer = case.call(base_url=url, headers=headers, timeout=WITHIN_S)
    case.validate_response(answer, checks=CHECKS)
    if answer.headers["content-type"] == ["application/problem+json"]:
        told = case.operation.definition.raw["responses"][str(answer.status_code)]["description"]
        assert f"`{answer.json()['code']}`" in told
    assert answer.status_code < 500 or answer.json()["code"] != "internal"
    assert box.answers()
