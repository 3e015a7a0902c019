"""An extension of griffe, which reads the code for the reference: signatures of `takes_settings`.

griffe reads the code without running it, so it finds only ``__init__(self, settings)``. This
extension shows the arguments that `inspect.signature` returns.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from griffe import Extension, Function, Parameter, ParameterKind, Parameters

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: ParameterKind.keyword_only,
}


class TakesSettings(Extension):
    """Replace the parameters of each ``__init__`` that `takes_settings` decorates."""

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        """Replace the parameters of a function that griffe has read."""
        if not any("takes_settings" in str(decorator.value) for decorator in func.decorators):
            return
        cls = getattr(importlib.import_module(func.module.path), func.parent.name)
        parameters = [func.parameters["self"]]
        for parameter in inspect.signature(cls).parameters.values():
            default = None
            if parameter.default is not inspect.Parameter.empty:
                default = getattr(parameter.default, "__name__", repr(parameter.default))
            parameters.append(
                Parameter(
                    parameter.name,
                    annotation=parameter.annotation,
                    kind=KINDS[parameter.kind],
                    default=default,
                )
            )
        func.parameters = Parameters(*parameters)
