"""Chat templates: Jinja in a sandbox, with the filters and functions that Hugging Face's templates expect."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Assign, Const, Expr, Filter, For, Getattr, Getitem, Name, Node, Pow, Scope, Template
from jinja2.parser import Parser
from jinja2.utils import Namespace

from execution.text.sandbox import BoundedEnvironment, TemplateUnbounded, bound_numbers, check_time_format
from execution.text.tokenizer import TOKEN_SUFFIX

#: Names of what the assistant thought, the first one first: templates read it under this name, those of gpt-oss under
#: the second.
_REASONING_NAMES: Final = ("reasoning_content", "thinking", "reasoning")

# Errors that expressions of a template can raise beside Jinja's own.
EXPRESSION_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplateError(Exception):
    """A template that is not Jinja, or that refuses the messages."""


class ChatTemplateUnbounded(ChatTemplateError):
    """A template that asks for a result without bound, whatever the messages are."""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles a template. The special tokens are its variables, such as `bos_token`."""
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            tree = environment.parse(source)
            #: Whether it loops over the parts of a turn, as templates of models that also take pictures do.
            self.takes_parts = _loops_over_content(tree)
            #: The special tokens that it may write, by their names.
            self.token_names = frozenset(
                name.name for name in tree.find_all(Name) if name.ctx == "load" and name.name.endswith(TOKEN_SUFFIX)
            )
            if (power := tree.find(Pow)) is not None:
                raise ChatTemplateUnbounded(f"line {power.lineno}: ** is an operator that templates may not use")
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error
        # Python compiles what Jinja makes of the source, and has limits of its own.
        except (*EXPRESSION_ERRORS, SyntaxError) as error:
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """Returns the prompt of a conversation, whose turns come oldest first. A template may never end.

        Turns have `role`, `content` and what else transformers gives to templates, which get them as from transformers:
        without what is None, and with reasoning of any name under the names that they read. Tools are usually JSON
        schemas; the template gets None if there are none.
        """
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[_prepare_turn(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateUnbounded as error:
            raise ChatTemplateUnbounded(error.message) from error
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except EXPRESSION_ERRORS as error:
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        """Parses the block into a scope with its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


class TemplateNamespace(Namespace):
    """What `namespace(…)` makes: it takes no name with an underscore in front, as from transformers."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        names = dict(*args, **kwargs)
        for name in names:
            _check_name(name)
        super().__init__(names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateRuntimeError(f"a namespace takes no name with an underscore in front, such as {name!r}")


def _prepare_turn(message: Mapping[str, Any]) -> dict[str, Any]:
    turn = {name: value for name, value in message.items() if value is not None}
    found = [turn[name] for name in _REASONING_NAMES if name in turn]
    return {"thinking": found[0], **turn, "reasoning_content": found[0]} if found else turn


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
    environment.filters["tojson"] = bound_numbers("tojson", _tojson, num_values=1)
    environment.globals["namespace"] = TemplateNamespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _loops_over_content(template: Template) -> bool:
    # Parameters of macros and loop variables are often called content, too.
    names = {"content"}
    for assignment in template.find_all(Assign):
        if isinstance(assignment.target, Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(For))


def _is_content(node: Node, names: Collection[str]) -> bool:
    """Tells whether an expression is the content of a turn, maybe filtered; `names` are variables that hold one."""
    match node:
        case Getattr(attr="content") | Getitem(arg=Const(value="content")):
            return True
        case Name(name=name):
            return name in names
        case Filter(node=Expr() as filtered):
            return _is_content(filtered, names)
    return False


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    check_time_format(template)
    # Local time, as transformers renders it.
    return datetime.now().strftime(template)
