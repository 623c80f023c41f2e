"""Compiles and runs the template of a model file as what it is: code of a stranger. Knows nothing of chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from sys import getsizeof
from time import thread_time
from types import BuiltinMethodType, CodeType, MethodType, TracebackType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context, pass_environment
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from lever.errors import TemplateError

MAX_SOURCE_CHARS = 256 << 10  # public templates reach about 30 k
# What a template may make while it renders: a base, and a multiple of what it was given, because some templates
# build their text by appending to all that came before.
BASE_BYTES = 8 << 20
BYTES_PER_INPUT_BYTE = 256
MAX_INTEGER_BITS = 4096
MAX_SECONDS = 2.0  # of this thread's processor time; the public templates take milliseconds
TICKS_PER_LOOK = 16  # hooks passed between two looks at the clock, which cost as much as a hook

FILENAME = "<chat template>"

# What a faulty or hostile template can raise while it runs; anything else is a fault of ours.
_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,  # RecursionError among them
    TypeError,
    ValueError,
)

# Methods and attributes by type: all that public templates use, none that makes much out of little.
_STRING = (
    "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace "
    "istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit "
    "rstrip split splitlines startswith strip swapcase title upper"
)
_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_STRING.split())),
    (dict, frozenset(["get", "items", "keys", "values"])),
    (list, frozenset(["count", "index"])),
    (tuple, frozenset(["count", "index", "grouper", "list"])),  # the last two: results of groupby
)
_METHODS = frozenset().union(*(names for _, names in _ATTRIBUTES)) | {"changed", "cycle", "next", "reset"}
_OPEN_TYPES = (LoopContext, Macro, Namespace, Cycler, Joiner)  # jinja2's own, with nothing dangerous on them
_FILTERS = (
    "abs capitalize count d default dictsort e escape first float groupby int items last length list lower map max "
    "min reject rejectattr reverse round safe select selectattr sort string title trim unique upper wordcount"
)
_TAGS = (nodes.Block, nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include, nodes.ScopedEvalContextModifier)


class Refusal(TemplateError):
    """The template called raise_exception: it does not take these messages."""


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # jinja2's shows the content, which may refer to other namespaces without end


class _Generation(Extension):
    """`{% generation %}`, with which training tools mark the assistant's text: renders its body."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering, and its meter: bytes left to make, processor time left to spend.

    jinja2's own sandbox keeps templates from Python's internals, but not from making 'a' * 10**10 or looping for
    a year. So every call, loop turn and expression that makes a value passes the meter: calls and operators by
    the sandbox's own hooks, the rest by `_Meter`. Between two passes only operations run whose cost is linear in
    values that the meter has let through.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, nbytes: int, mark: str = "", now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation])
        self.filters = {**{name: FILTERS[name] for name in _FILTERS.split()}, **_OWN_FILTERS}
        names = ("range", "dict", "cycler", "joiner")
        self.globals = {name: self.globals[name] for name in names} | {
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }
        self.mark = mark
        self._nbytes = nbytes
        self._deadline = thread_time() + MAX_SECONDS
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % TICKS_PER_LOOK == 0 and thread_time() > self._deadline:
            raise TemplateError(f"the model's chat template runs for more than {MAX_SECONDS:g} s: it may be hostile")

    def spend(self, nbytes: int) -> None:
        self._nbytes -= nbytes
        if self._nbytes < 0:
            raise TemplateError("the model's chat template makes far more than it was given: it may be hostile")

    def metered(self, value: Any) -> Any:
        """`value`, once it is paid for."""
        self.tick()
        if isinstance(value, str):
            self.spend(getsizeof(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(_weight(value, self._nbytes))
        elif isinstance(value, int):
            self.spend(0 if value.bit_length() <= MAX_INTEGER_BITS else self._nbytes + 1)
        elif isinstance(value, Iterator):
            return map(self.metered, value)
        return value

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return self.metered(super().call(context, obj, *args, **kwargs))

    def call_filter(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self.metered(super().call_filter(name, value, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise TypeError("formatting with % is not offered")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.spend(0 if left.bit_length() * right <= MAX_INTEGER_BITS else self._nbytes + 1)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self.spend(getsizeof(value) * max(times, 0))
        return self.metered(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, _OPEN_TYPES):
            return super().is_safe_attribute(obj, attr, value)
        return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # jinja2 prints nothing and goes on
        raise TypeError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is not offered")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2 asks at each access whether a method needs a guarded twin (its own guard is for str.format)."""
        if isinstance(value, BuiltinMethodType | MethodType) and isinstance(value.__self__, str):
            guard = {"join": self._joined, "replace": self._replaced}.get(value.__name__)
            return None if guard is None else partial(guard, value)
        return None

    def _joined(self, join: Any, items: Any) -> str:
        items = list(self.metered(iter(items)))
        self.spend(getsizeof(join.__self__) * len(items))
        return str(join(items))

    def _replaced(self, replace: Any, old: str, new: str, count: int = -1) -> str:
        self.spend(replace.__self__.count(old) * getsizeof(new))
        return str(replace(old, new, count))


def _weight(value: Any, limit: float = float("inf")) -> int:
    """Bytes of `value` with all that it holds, counted as a tree, so shared parts more than once; up to `limit`."""
    nbytes, pending = 0, [value]
    while pending and nbytes <= limit:
        item = pending.pop()
        nbytes += getsizeof(item)
        if isinstance(item, list | tuple | dict):
            pending += item
        if isinstance(item, dict):
            pending += item.values()
    return nbytes


def _raise_exception(message: object) -> None:
    raise Refusal(f"the model's chat template refuses these messages: {_one_line(message)}")


@pass_context
def _filter_metered(context: Context, value: Any) -> Any:
    return _sandbox(context.environment).metered(value)


@pass_context
def _filter_tick(context: Context, _: Any) -> None:
    _sandbox(context.environment).tick()


@pass_context
def _filter_join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> Any:
    sandbox = _sandbox(context.environment)
    if attribute is not None:
        value = sandbox.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    items = list(sandbox.metered(iter(value)))
    sandbox.spend(getsizeof(str(d)) * len(items))
    return str(d).join(map(str, items))


@pass_environment
def _filter_replace(environment: jinja2.Environment, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    return _sandbox(environment)._replaced(text.replace, old, new, -1 if count is None else count)


@pass_environment
def _filter_indent(
    environment: jinja2.Environment, s: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    unit = width if isinstance(width, int) else getsizeof(width)
    _sandbox(environment).spend(max(unit, 0) * (str(s).count("\n") + 1))
    return str(FILTERS["indent"](str(s), width, first, blank))


@pass_environment
def _filter_tojson(
    environment: jinja2.Environment,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: the options and defaults of the reference renderer."""
    sandbox = _sandbox(environment)
    sandbox.spend(max(indent, 0) * 1000 if isinstance(indent, int) else getsizeof(indent))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    text = "".join(sandbox.metered(encoder.iterencode(value)))
    return text.replace(json.dumps(sandbox.mark)[1:-1], sandbox.mark) if ensure_ascii and sandbox.mark else text


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "indent": _filter_indent,
    "join": _filter_join,
    "replace": _filter_replace,
    "tojson": _filter_tojson,
    "lever.metered": _filter_metered,
    "lever.tick": _filter_tick,
}


def _sandbox(environment: jinja2.Environment) -> Sandbox:
    assert isinstance(environment, Sandbox)
    return environment


# --- compiling ----------------------------------------------------------------------------------------------


def compiled(source: str) -> CodeType:
    """The template with hooks for the meter. What lever does not offer is refused now, not while chatting."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"the model's chat template has {len(source)} characters: {MAX_SOURCE_CHARS} are the limit")
    sandbox = Sandbox(BASE_BYTES)
    try:
        tree = sandbox.parse(source)
        for node in tree.find_all(nodes.Node):
            if fault := _fault(node, sandbox):
                raise jinja2.TemplateAssertionError(fault, node.lineno)
        return sandbox.compile(_Meter().visit(tree), filename=FILENAME)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the model's chat template, line {error.lineno}: {_one_line(error.message)}") from error
    except (SyntaxError, RecursionError, ValueError) as error:  # from Python's compiler: too deep, too large
        raise TemplateError(f"the model's chat template does not compile: {_one_line(error)}") from error


def _fault(node: nodes.Node, sandbox: Sandbox) -> str | None:
    """What `node` asks for that lever does not offer."""
    offer = "lever does not offer "
    if isinstance(node, _TAGS):
        return f"{offer}{{% {type(node).__name__.lower()} %}}"
    if isinstance(node, nodes.Filter) and node.name not in sandbox.filters:
        return f"{offer}the filter {node.name!r}"
    if isinstance(node, nodes.Test) and node.name not in sandbox.tests:
        return f"{offer}the test {node.name!r}"
    if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
        return f"access to {node.attr!r} is refused"
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr not in _METHODS:
        return f"{offer}the method {node.node.attr!r}"
    if isinstance(node, nodes.Mod) and isinstance(node.left, nodes.Const) and isinstance(node.left.value, str):
        return f"{offer}formatting with %"
    return None


class _Meter(NodeTransformer):
    """Puts a hook around each expression that can make a large value, and at the start of each loop turn."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = _hook("tick", nodes.Const(None, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_hook("metered", child) for child in node.nodes]
        return node

    def _metered(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _hook("metered", node)

    visit_Concat = visit_Dict = visit_Filter = visit_List = _metered

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._metered(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._metered(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def _bare(self, node: nodes.FilterBlock | nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.filter, nodes.Filter) and isinstance(node.filter.node, nodes.Filter):
            node.filter = node.filter.node  # the compiler wants the block's own filter here
        return node

    visit_FilterBlock = visit_AssignBlock = _bare


def _hook(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, f"lever.{name}", [], [], None, None, lineno=node.lineno)


def _line(error: BaseException) -> str:
    """Where in the template an error arose."""
    traceback: TracebackType | None = error.__traceback__
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == FILENAME:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f", line {line}"


def _one_line(message: object) -> str:
    text = " ".join(str(message).split())[:300]
    return "".join(character if character.isprintable() else "?" for character in text)
