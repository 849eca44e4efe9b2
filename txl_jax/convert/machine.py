"""A pickle as what it says, not as what it would do.

The opcodes run on a stack of their own: a class or function is a `Global`, a name that
is never looked up, and what a pickle makes with it is an `Object` that records how.
Nothing is imported and nothing is called, so nothing that a pickle holds can run.
"""

import dataclasses
import pickletools
from collections.abc import Callable
from typing import Any

WORD_BYTES = 1 << 20  # a longer string of Python 2 is no text but an array's bytes
PLAIN = (str, bytes, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True)
class Global:
    """A class or function: "module.name", never imported."""

    name: str


class Object:
    """An instance of something unknown: what made it, of what, and its state."""

    def __init__(self, made: Any, args: Any = ()) -> None:
        self.made = made.name if isinstance(made, Global) else "something"
        self.args = args
        self.state: Any = {}
        self.items: list[Any] = []

    def field(self, name: str) -> Any:
        """Returns an attribute of the instance, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


Make = Callable[[Any], Any]


class Machine:
    """Runs one pickle.

    `makers` has a function of the arguments for each callable that is understood, and
    `persistent` gives the meaning of persistent ids. Whatever is wrong with a pickle
    raises one of DAMAGE.
    """

    def __init__(self, makers: dict[str, Make], persistent: Make, size: int) -> None:
        self.makers = makers | {name: self._dict for name in DICTS}
        self.persistent = persistent
        self.left = size  # pairs that may still be copied: each took a byte to say
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, source: Any) -> Any:
        """Returns the value of the pickle that begins here; reads no byte beyond it."""
        for opcode, arg, _ in pickletools.genops(source):
            name = opcode.name
            if name in PUSHED:
                self.stack.append(arg)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name])
            elif name in HANDLERS:
                HANDLERS[name](self, arg)
            elif name not in IGNORED:
                raise ValueError(f"opcode {name} has no place in it")
        return self.stack.pop()

    def _to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("its stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _dict(self, args: Any) -> Any:
        """Makes a dict of the arguments of an OrderedDict or a Counter."""
        given = args[0] if args else {}
        if isinstance(given, dict):
            return given
        made: dict[Any, Any] = {}
        if isinstance(given, list):
            self.left -= len(given)
            if self.left < 0:
                raise ValueError("it repeats itself without end")
            for key, value in given:
                _put(made, key, value)
        return made

    def string(self, arg: str) -> None:
        """Pushes a string of Python 2: bytes, which are UTF-8 if they can be."""
        if len(arg) <= WORD_BYTES:
            try:
                arg = arg.encode("latin-1").decode("utf-8")
            except UnicodeError:
                pass
        self.stack.append(arg)

    def mark(self, _: Any) -> None:
        """Begins a run of items."""
        self.outer.append(self.stack)
        self.stack = []

    def pop(self, _: Any) -> None:
        """Drops the top, which may be a mark."""
        if self.stack:
            self.stack.pop()
        else:
            self._to_mark()

    def append(self, _: Any) -> None:
        """Adds one item to a list."""
        (item,) = self._pop(1)
        _extend(self.stack[-1], [item])

    def extend(self, _: Any) -> None:
        """Adds items to a list or a set."""
        items = self._to_mark()
        _extend(self.stack[-1], items)

    def set_item(self, _: Any) -> None:
        """Adds one pair to a dict."""
        key, value = self._pop(2)
        _put(self.stack[-1], key, value)

    def set_items(self, _: Any) -> None:
        """Adds pairs to a dict."""
        items = self._to_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            _put(self.stack[-1], key, value)

    def make_dict(self, _: Any) -> None:
        """Makes a dict of pairs."""
        items = self._to_mark()
        self.stack.append({})
        for key, value in zip(items[::2], items[1::2], strict=True):
            _put(self.stack[-1], key, value)

    def make_set(self, _: Any) -> None:
        """Makes a frozen set; its members need no hash here."""
        made = Object(Global("builtins.frozenset"))
        made.items = self._to_mark()
        self.stack.append(made)

    def get(self, index: int) -> None:
        """Pushes what was remembered."""
        self.stack.append(self.memo[index])

    def put(self, index: int) -> None:
        """Remembers the top."""
        self.memo[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        """Remembers the top under the next number."""
        self.memo[len(self.memo)] = self.stack[-1]

    def name(self, arg: str) -> None:
        """Pushes the name of a class or function."""
        self.stack.append(Global(arg.replace(" ", ".", 1)))

    def stack_name(self, _: Any) -> None:
        """Pushes the name of a class or function, taken from the stack."""
        module, name = self._pop(2)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a name in it is no text")
        self.stack.append(Global(f"{module}.{name}"))

    def make(self, _: Any) -> None:
        """Pushes what a callable would give for arguments."""
        called, args = self._pop(2)
        known = self.makers.get(called.name) if isinstance(called, Global) else None
        if not isinstance(args, tuple):
            raise TypeError("a call in it has no arguments")
        self.stack.append(known(args) if known else Object(called, args))

    def make_with_names(self, _: Any) -> None:
        """Pushes an instance made with keyword arguments."""
        called, args, named = self._pop(3)
        self.stack.append(Object(called, (args, named)))

    def instance(self, arg: str) -> None:
        """Pushes an instance of a class of Python 2."""
        args = tuple(self._to_mark())
        self.stack.append(Object(Global(arg.replace(" ", ".", 1)), args))

    def instance_of(self, _: Any) -> None:
        """Pushes an instance of a class of Python 2, which is the first item."""
        called, *args = self._to_mark()
        self.stack.append(Object(called, tuple(args)))

    def build(self, _: Any) -> None:
        """Gives an instance its state; nothing else here has one to change."""
        (state,) = self._pop(1)
        if isinstance(self.stack[-1], Object):
            self.stack[-1].state = state

    def persist(self, arg: str) -> None:
        """Pushes what a persistent id means."""
        self.stack.append(self.persistent(arg))

    def stack_persist(self, _: Any) -> None:
        """Pushes what a persistent id from the stack means."""
        self.stack.append(self.persistent(*self._pop(1)))


def _put(target: Any, key: Any, value: Any) -> None:
    if isinstance(target, Object):
        target.items.append((key, value))
        return
    if not isinstance(target, dict):
        raise TypeError("a key in it belongs to no dict")
    # A key that is no text or number keeps its place alone: its hash might not end.
    target[key if isinstance(key, PLAIN) else Object(None, key)] = value


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, Object):
        target = target.items
    if not isinstance(target, list):
        raise TypeError("an item in it belongs to no list")
    target += items


Handler = Callable[[Machine, Any], Any]


def _tuple(count: int) -> Handler:
    def make(machine: Machine, _: Any) -> None:
        machine.stack.append(tuple(machine._pop(count)))

    return make


def _collect(kind: type) -> Handler:
    def make(machine: Machine, _: Any) -> None:
        items = machine._to_mark()
        machine.stack.append(kind(items))

    return make


DAMAGE = (
    *(ValueError, IndexError, KeyError, TypeError, AttributeError, EOFError),
    *(OverflowError, MemoryError, RuntimeError),
)
DICTS = ("collections.OrderedDict", "collections.Counter")
PUSHED = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"),
    *("FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
IGNORED = {"PROTO", "FRAME", "STOP"}
HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), Machine.string),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine.get),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), Machine.put),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), Machine.make),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), Machine.extend),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_SET": lambda machine, _: machine.stack.append(Object(Global("set"))),
    "LIST": _collect(list),
    "TUPLE": _collect(tuple),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "MARK": Machine.mark,
    "POP": Machine.pop,
    "POP_MARK": lambda machine, _: machine._to_mark(),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "APPEND": Machine.append,
    "SETITEM": Machine.set_item,
    "SETITEMS": Machine.set_items,
    "DICT": Machine.make_dict,
    "FROZENSET": Machine.make_set,
    "MEMOIZE": Machine.memoize,
    "GLOBAL": Machine.name,
    "STACK_GLOBAL": Machine.stack_name,
    "NEWOBJ_EX": Machine.make_with_names,
    "INST": Machine.instance,
    "OBJ": Machine.instance_of,
    "BUILD": Machine.build,
    "PERSID": Machine.persist,
    "BINPERSID": Machine.stack_persist,
}
