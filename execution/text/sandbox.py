"""A Jinja environment for templates of strangers: what grows without bound in one step is refused.

Jinja's own sandbox keeps templates from code, not from the processor and the memory: it folds `9 ** (9 ** 9)` when it
compiles a template. The text process has limits for all that takes many steps; these refusals say what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any, Final

import jinja2
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import generate_lorem_ipsum
from markupsafe import Markup

#: The largest width, precision, indentation or number of parts that a template may ask for.
MAX_WIDTH: Final = 9_999
#: The largest result of a repetition, in characters or items.
MAX_REPEATED: Final = 1_000_000
#: Jinja's own limit, which it reports as an overflow.
MAX_RANGE: Final = 100_000
#: The longest product of integers, in bits.
MAX_PRODUCT_BITS: Final = 4096

#: Filters and methods of strings and integers that make as much as a number says.
_WIDTH_FILTERS: Final = ("batch", "center", "indent", "round", "slice")
_WIDTH_METHODS: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
_FORMAT_METHODS: Final = frozenset({"format", "format_map"})

_LARGE_NUMBER: Final = re.compile(r"\d{5,}")
#: In formats of `%` and of `strftime`, between a percent sign and the letter of the conversion. A star takes the number
#: from the arguments.
_LARGE_CONVERSION: Final = re.compile(r"%(?:\([^()]*\))?[^%A-Za-z]*?(?:\d{5,}|\*)")


class TemplateUnbounded(jinja2.TemplateRuntimeError):
    """A template that asks for a result without bound."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Refuses powers, and repetitions, widths and ranges beyond the bounds of this module."""

    #: Jinja does not fold these while it compiles.
    intercepted_binops = frozenset({"**", "*", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _WIDTH_FILTERS:
            self.filters[name] = bound_numbers(name, self.filters[name], num_values=1)
        self.filters["format"] = _bound_format(self.filters["format"])
        self.globals["lipsum"] = bound_numbers("lipsum", generate_lorem_ipsum)
        self.globals["range"] = _bounded_range

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Checks the operands of an operator that Jinja does not call by itself, then calls it."""
        _BINOP_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., Any] | None:
        """Returns a bounded function for a method that formats or pads; None for any other value.

        Jinja calls this wherever a template takes an attribute.
        """
        if not isinstance(value, MethodType | BuiltinMethodType):
            return None
        owner, name = value.__self__, value.__name__
        if isinstance(owner, str) and name in _FORMAT_METHODS:
            return self._bounded_format(owner, has_mapping=name == "format_map")
        if isinstance(owner, str | bytes | int) and name in _WIDTH_METHODS:
            return bound_numbers(name, value)
        return None

    def _bounded_format(self, template: str, *, has_mapping: bool) -> Callable[..., str]:
        formatter: SandboxedFormatter
        if isinstance(template, Markup):
            formatter = _BoundedEscapeFormatter(self, escape=template.escape)
        else:
            formatter = _BoundedFormatter(self)

        def format_map(mapping: Mapping[str, Any]) -> str:
            return type(template)(formatter.vformat(template, (), mapping))

        def format_arguments(*args: Any, **kwargs: Any) -> str:
            return type(template)(formatter.vformat(template, args, kwargs))

        return format_map if has_mapping else format_arguments


class _BoundedFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        # Fields within the specification have been filled in already.
        _check_format(_LARGE_NUMBER, format_spec)
        return super().format_field(value, format_spec)


class _BoundedEscapeFormatter(_BoundedFormatter, SandboxedEscapeFormatter):
    pass


def bound_numbers(name: str, function: Callable[..., Any], num_values: int = 0) -> Callable[..., Any]:
    """Returns a function that refuses integers beyond `MAX_WIDTH`, and else calls `function`.

    Its first `num_values` arguments say nothing of how much it makes: 1 for a filter, which gets what it is applied to.
    """

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for number in (*args[num_values:], *kwargs.values()):
            if isinstance(number, int) and abs(number) > MAX_WIDTH:
                raise TemplateUnbounded(f"{name} of {number}; at most {MAX_WIDTH}")
        return function(*args, **kwargs)

    return bounded


def check_time_format(template: str) -> None:
    """Checks a format of `strftime`."""
    _check_format(_LARGE_CONVERSION, template)


def _bound_format(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(_LARGE_CONVERSION, str(value))
        return function(value, *args, **kwargs)

    return bounded


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    # The length of a longer range may be no machine integer, so this does not ask for it.
    if numbers[MAX_RANGE : MAX_RANGE + 1]:
        raise TemplateUnbounded(f"a range of more than {MAX_RANGE}")
    return numbers


def _check_format(large: re.Pattern[str], template: str) -> None:
    if found := large.search(template):
        raise TemplateUnbounded(f"a width in {found[0][:20]!r}; numbers up to {MAX_WIDTH}")


def _refuse_power(_left: Any, _right: Any) -> None:
    raise TemplateUnbounded("the operator **, which templates may not use")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_PRODUCT_BITS:
            raise TemplateUnbounded(f"a product of more than {MAX_PRODUCT_BITS} bits")
        return
    count, repeated = (left, right) if isinstance(left, int) else (right, left)
    if isinstance(count, int) and hasattr(repeated, "__len__") and len(repeated) * count > MAX_REPEATED:
        raise TemplateUnbounded(f"a repetition of more than {MAX_REPEATED}")


def _check_modulo(left: Any, _right: Any) -> None:
    if isinstance(left, str):
        _check_format(_LARGE_CONVERSION, left)


_BINOP_CHECKS: Final[Mapping[str, Callable[[Any, Any], None]]] = MappingProxyType(
    {"**": _refuse_power, "*": _check_product, "%": _check_modulo}
)
