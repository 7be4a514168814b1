"""Goal: the OpenAPI schema is true. Method: schemathesis makes requests from it, good and bad."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.scripted import ScriptedService
from tiercel.server.app import create_app
from tiercel.server.options import ServerOptions

SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", create_app(ScriptedService(), ServerOptions(loopback=True))
)
BEYOND_A_SCHEMA = (
    "context_length_exceeded",
    "conflicting_values",
    "invalid_grammar",
    "invalid_store",
    "not_a_token",
    "not_an_address",
    "no_such_peer",
    "no_tools",
)
"""Why a request may be refused that is right field by field."""


@SCHEMA.parametrize()
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_call_does_what_the_schema_says(case):
    response = case.call()
    excused = response.status_code == 400 and response.json()["error"]["code"] in BEYOND_A_SCHEMA
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if excused else [])
