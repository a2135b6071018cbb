"""Codes are stable, and each has its exit code and its status."""

from __future__ import annotations

import pytest
from llamactl_supervisor.errors import Code, ExitCode, FailedError, error, http_status
from llamactl_supervisor.models import Problem


@pytest.mark.parametrize("code", list(Code))
def test_every_code_is_mapped(code: Code) -> None:
    exc = error(code, "it happened")
    assert exc.exit_code in set(ExitCode) - {ExitCode.OK, ExitCode.INTERRUPTED}
    assert 400 <= http_status(exc) < 600


@pytest.mark.parametrize(
    ("code", "exit_code", "status"),
    [
        ("invalid_request", 2, 400),
        ("invalid_geometry", 5, 400),
        ("engine_stopped", 3, 409),
        ("daemon_unreachable", 4, 503),
        ("conflict", 5, 409),
        ("port_in_use", 5, 409),
        ("insufficient_memory", 5, 409),
        ("page_out_failed", 5, 500),
        ("context_build_failed", 5, 503),
        ("unknown_page", 5, 404),
        ("bad_name", 5, 400),
        ("page_ceiling", 5, 503),
        ("request_waiting", 5, 409),
        ("page_mismatch", 5, 409),
        ("bad_body", 5, 400),
        ("no_file", 5, 400),
        ("bad_file", 5, 400),
        ("no_space", 5, 507),
        ("no_access", 5, 500),
        ("not_supported", 5, 501),
        ("files_failed", 1, 500),
        ("timed_out", 6, 504),
        ("engine_exited", 1, 500),
        ("not_found", 1, 404),
    ],
)
def test_what_scripts_rely_on(code: str, exit_code: int, status: int) -> None:
    exc = error(code, "it happened")
    assert (exc.exit_code, http_status(exc)) == (exit_code, status)


def test_a_code_of_a_newer_daemon_is_a_failure() -> None:
    exc = error("from_the_future", "it happened")
    assert type(exc) is FailedError
    assert (exc.code, exc.exit_code, http_status(exc)) == ("from_the_future", 1, 500)


def test_an_error_crosses_the_wire_unchanged() -> None:
    sent = error(Code.CONFLICT, "another engine is up", hint="down first", details={"port": 1})
    got = Problem.model_validate_json(Problem.of(sent).model_dump_json()).to_error()
    assert type(got) is type(sent)
    assert (got.code, got.message, got.hint, got.details) == (
        *(sent.code, sent.message, sent.hint, sent.details),
    )
