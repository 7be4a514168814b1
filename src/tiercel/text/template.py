"""The chat template of a model folder, in Jinja, with what Hugging Face gives its templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tiercel.errors import WeightsError

TEMPLATE_FAILS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


def read_template(folder: Path, config: Mapping[str, Any]) -> Template | None:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    file, given = folder / "chat_template.jinja", config.get("chat_template")
    try:
        if file.exists():
            given = file.read_text(encoding="utf-8")
        if isinstance(given, list):
            given = {each["name"]: each["template"] for each in given}.get("default")
        return None if given is None else environment.from_string(given)
    except (TemplateError, OSError, ValueError, LookupError) as error:
        raise WeightsError(folder, f"has a chat template that can not be read: {error}") from error


def _tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
    """As in Hugging Face's templates: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **how)


def _raise_exception(why: str) -> NoReturn:
    raise TemplateError(why)
