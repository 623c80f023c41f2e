"""Compiles and runs the template of a model file as what it is: a stranger's code. Knows nothing of chats.

jinja2's own sandbox keeps a template from Python's internals, but not from making 'a' * 10**10 or from looping for
a year. Here every call, operator, loop turn and expression that makes a value passes a meter (`Sandbox`), and what
a template may use at all is a short list. Between two passes run only operations whose cost is linear in values
that the meter has let through, so a template ends soon after its bytes or its processor time are used up.
"""

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
MAX_SECONDS = 2.0  # of this thread's processor time; public templates take milliseconds
TICKS_PER_LOOK = 16  # passes of the meter between two looks at the clock, each of which costs as much as a pass
MAX_INTEGER_BITS = 4096
MAX_DATE_FORMAT_CHARS = 100
MAX_JSON_WIDTH = 16
FILENAME = "<chat template>"

# Methods and attributes by type: all that public templates use, none that makes much out of little.
STRING_METHODS = (
    "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace "
    "istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit "
    "rstrip split splitlines startswith strip swapcase title upper"
)
ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(STRING_METHODS.split())),
    (dict, frozenset(["get", "items", "keys", "values"])),
    (list, frozenset(["count", "index"])),
    (tuple, frozenset(["count", "index", "grouper", "list"])),  # the last two: results of groupby
)
OPEN_TYPES = (LoopContext, Macro, Namespace, Cycler, Joiner)  # jinja2's own, with nothing dangerous on them
METHODS = frozenset(["changed", "cycle", "next", "reset"]).union(*(names for _, names in ATTRIBUTES))
JINJA_FILTERS = (
    "abs capitalize count d default dictsort e escape first float groupby int items last length list lower map max "
    "min reject rejectattr reverse round safe select selectattr sort string title trim unique upper wordcount"
)
JINJA_GLOBALS = ("range", "dict", "cycler", "joiner")
REFUSED_TAGS = (
    nodes.Block,
    nodes.Extends,
    nodes.FromImport,
    nodes.Import,
    nodes.Include,
    nodes.ScopedEvalContextModifier,
)
# Filters that take the name of a filter or a test, and at which place.
NAMING_FILTERS = {
    "map": ("filter", 0),
    "select": ("test", 0),
    "reject": ("test", 0),
    "selectattr": ("test", 1),
    "rejectattr": ("test", 1),
}

# What a faulty or hostile template can raise while it runs; anything else is a fault of ours.
FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,  # RecursionError among them
    TypeError,
    ValueError,
)


class Refusal(TemplateError):
    """The template called raise_exception: it does not take these messages."""


def compiled(source: str) -> CodeType:
    """The template with its meter built in. What lever does not offer is refused now, not while chatting."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"the model's chat template is longer than {MAX_SOURCE_CHARS} characters")
    sandbox = Sandbox(BASE_BYTES)
    try:
        tree = sandbox.parse(source)
        for node in tree.find_all(nodes.Node):
            if fault := _fault(node, sandbox):
                raise jinja2.TemplateAssertionError(fault, node.lineno)
        return sandbox.compile(_Meter().visit(tree), filename=FILENAME)
    except jinja2.TemplateSyntaxError as error:
        place = f"the model's chat template, line {error.lineno}"
        raise TemplateError(f"{place}: {_one_line(error.message)}") from error
    except (SyntaxError, RecursionError, ValueError) as error:  # Python's compiler: too deep, a number too long
        raise TemplateError(f"the model's chat template does not compile: {_one_line(error)}") from error


def rendered(
    code: CodeType,
    context: Mapping[str, Any],
    *,
    mark: str = "",
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """The text that a compiled template makes of `context`. `mark` is a character that has to stay whole.

    Raises Refusal if the template raised an exception of its own, TemplateError for any fault.
    """
    sandbox = Sandbox(BASE_BYTES + BYTES_PER_INPUT_BYTE * _weight(context), mark=mark, now=now)
    template = jinja2.Template.from_code(sandbox, code, sandbox.make_globals(None))
    try:
        return template.render(context)
    except FAULTS as error:
        raise TemplateError(f"the model's chat template{_line(error)}: {_one_line(error)}") from error


# --- the meter ----------------------------------------------------------------------------------------------


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering, with its meter: bytes left to make, processor time left to spend."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, nbytes: int, *, mark: str = "", now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation])
        self.filters = {**{name: FILTERS[name] for name in JINJA_FILTERS.split()}, **OWN_FILTERS}
        self.globals = {
            **{name: self.globals[name] for name in JINJA_GLOBALS},
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": partial(_strftime, now),
        }
        self.mark = mark
        self._nbytes = nbytes
        self._deadline = thread_time() + MAX_SECONDS
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % TICKS_PER_LOOK == 0 and thread_time() > self._deadline:
            raise TemplateError(f"the model's chat template ran for {MAX_SECONDS:g} s: it may be hostile")

    def spend(self, nbytes: int) -> None:
        self._nbytes -= nbytes
        if self._nbytes < 0:
            raise TemplateError("the model's chat template makes far more than it was given: it may be hostile")

    def metered(self, value: Any) -> Any:
        """`value`, once it is paid for; an iterator is paid for item by item."""
        self.tick()
        if isinstance(value, str):
            self.spend(getsizeof(value))
        elif isinstance(value, list | tuple | dict):
            self.spend(_weight(value, self._nbytes))
        elif isinstance(value, int):
            _check_bits(value.bit_length())
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
            raise TypeError("lever does not offer formatting with %")
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self.spend(getsizeof(value) * max(times, 0))
        return self.metered(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, OPEN_TYPES):
            return super().is_safe_attribute(obj, attr, value)
        return any(isinstance(obj, kind) and attr in names for kind, names in ATTRIBUTES)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # jinja2 would print nothing and go on
        raise TypeError(f"lever does not offer the attribute {attribute!r} of {type(obj).__name__!r}")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2 asks at each access whether a method needs a guarded twin (its own guard is for str.format)."""
        if not isinstance(value, BuiltinMethodType | MethodType) or not isinstance(value.__self__, str):
            return None
        twins: dict[str, Callable[..., str]] = {"join": self.join, "replace": self.replace}
        return partial(twins[value.__name__], value) if value.__name__ in twins else None

    def join(self, method: Any, items: Any) -> str:
        """str.join, given as a bound method."""
        paid = list(self.metered(iter(items)))
        self.spend(getsizeof(method.__self__) * len(paid))
        return str(method(paid))

    def replace(self, method: Any, old: str, new: str, count: int = -1) -> str:
        """str.replace, given as a bound method."""
        self.spend(method.__self__.count(old) * getsizeof(new))
        return str(method(old, new, count))


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateError(f"the model's chat template makes an integer of more than {MAX_INTEGER_BITS} bits")


def _weight(value: Any, limit: float = float("inf")) -> int:
    """Bytes of `value` and all it holds, counted up to `limit`; as a tree, so that shared parts count each time."""
    nbytes, pending = 0, [value]
    while pending and nbytes <= limit:
        item = pending.pop()
        nbytes += getsizeof(item)
        if isinstance(item, list | tuple | dict):
            pending += item
        if isinstance(item, dict):
            pending += item.values()
    return nbytes


class _Meter(NodeTransformer):
    """Puts a hook around each expression that can make a large value, and at the start of each loop turn.

    Calls and intercepted operators need none: `Sandbox` sees them anyway.
    """

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


# --- what a template may use --------------------------------------------------------------------------------


def _fault(node: nodes.Node, sandbox: Sandbox) -> str | None:
    """What `node` asks for that lever does not offer."""
    offer = "lever does not offer"
    if isinstance(node, REFUSED_TAGS):
        return f"{offer} {type(node).__name__} tags"
    if isinstance(node, nodes.Getattr) and node.attr.startswith("_"):
        return f"access to {node.attr!r} is refused"
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr not in METHODS:
        return f"{offer} the method {node.node.attr!r}"
    if isinstance(node, nodes.Mod) and isinstance(node.left, nodes.Const) and isinstance(node.left.value, str):
        return f"{offer} formatting with %"
    if isinstance(node, nodes.Filter | nodes.Test):
        for kind, name in _names(node):
            if name not in (sandbox.filters if kind == "filter" else sandbox.tests):
                return f"{offer} the {kind} {name!r}"
    return None


def _names(node: nodes.Filter | nodes.Test) -> Iterator[tuple[str, object]]:
    """The filters and tests that `node` names, as (kind, name)."""
    yield ("filter" if isinstance(node, nodes.Filter) else "test"), node.name
    kind, place = NAMING_FILTERS.get(node.name, ("", 0))
    if kind and len(node.args) > place and isinstance(argument := node.args[place], nodes.Const):
        yield kind, argument.value


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # jinja2's shows what is inside, which may be other namespaces without end


class _Generation(Extension):
    """`{% generation %}`, by which training tools mark what the assistant said: renders what is inside."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _strftime(now: Callable[[], datetime], form: str) -> str:
    if len(form) > MAX_DATE_FORMAT_CHARS:
        raise ValueError(f"the format of a date is longer than {MAX_DATE_FORMAT_CHARS} characters")
    return now().strftime(form)


def _raise_exception(message: object) -> None:
    raise Refusal(f"the model's chat template refuses these messages: {_one_line(message)}")


@pass_context  # a filter that takes the context is never run while compiling
def _filter_metered(context: Context, value: Any) -> Any:
    return _sandbox(context.environment).metered(value)


@pass_context
def _filter_tick(context: Context, _: Any) -> None:
    _sandbox(context.environment).tick()


@pass_context
def _filter_join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    sandbox = _sandbox(context.environment)
    if attribute is not None:
        value = sandbox.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    return sandbox.join(str(d).join, map(str, value))


@pass_environment
def _filter_replace(environment: jinja2.Environment, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    return _sandbox(environment).replace(str(s).replace, str(old), str(new), -1 if count is None else count)


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
    """JSON without HTML escapes, with the options and defaults of the reference renderer."""
    sandbox = _sandbox(environment)
    widths = [len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ())]
    if max(widths) > MAX_JSON_WIDTH:
        raise ValueError(f"tojson indents and separates by at most {MAX_JSON_WIDTH} characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    text = "".join(sandbox.metered(encoder.iterencode(value)))
    escape = json.dumps(sandbox.mark)[1:-1]
    return text.replace(escape, sandbox.mark) if sandbox.mark and ensure_ascii else text


OWN_FILTERS: dict[str, Callable[..., Any]] = {
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


# --- messages -----------------------------------------------------------------------------------------------


def _line(error: BaseException) -> str:
    """Where in the template an error arose; jinja2 has put the template's own lines into the traceback."""
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
