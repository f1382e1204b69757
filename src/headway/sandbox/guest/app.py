"""The guest: CPython for WebAssembly with Headway's client. It runs whatever source it is given."""

import asyncio
import contextlib
import encodings
import pkgutil
import random
import sys
import time

import componentize_py_types  # type: ignore[import-not-found]
import wit_world  # type: ignore[import-not-found]

import headway as hw
from headway.remote import chat, context, forward, program
from headway.remote.connection import guest
from headway.remote.generation import generator, sequences
from headway.sandbox import source as programs

# What programs may import has to be here: at run time there are no files to import from.
LEFT_OUT = {
    "antigravity", "this", "idlelib", "turtledemo", "turtle", "tkinter", "ensurepip", "venv", "pydoc_data",
    "webbrowser",
}  # fmt: skip
SUBMODULES = (
    "collections.abc", "concurrent.futures", "email.message", "html.parser", "importlib.resources", "json.decoder",
    "logging.handlers", "unittest.mock", "urllib.parse", "xml.etree.ElementTree", "os.path",
)  # fmt: skip
CODECS = tuple(f"encodings.{module.name}" for module in pkgutil.iter_modules(encodings.__path__))
for name in (*sorted(sys.stdlib_module_names - LEFT_OUT), *SUBMODULES, *CODECS):
    with contextlib.suppress(ImportError):
        __import__(name)

# Names of the engine's own process: here they are the client's.
SAME = {
    "Engine": program.ProgramEngine,
    "Context": context.RemoteContext,
    "Forward": forward.RemoteForward,
    "Execution": forward.RemoteExecution,
    "ChatReply": chat.RemoteChatReply,
    "Generation": generator.RemoteGeneration,
    "Generations": sequences.RemoteGenerations,
}
for name, kind in SAME.items():
    setattr(hw, name, kind)
for name in hw.__all__:
    with contextlib.suppress(ImportError, hw.HeadwayError):
        getattr(hw, name)


def _missing(name: str) -> object:
    if name in hw.__all__:
        raise hw.Unsupported(
            f"headway.{name} needs numpy or an engine in this process; a sandboxed program has neither"
        )
    raise AttributeError(f"module 'headway' has no attribute {name!r}")


hw.__getattr__ = _missing


def _sleep(seconds: float) -> None:
    raise RuntimeError("time.sleep would block the program; await asyncio.sleep instead")


class WitWorld(wit_world.WitWorld):
    """The export of `program.wit`."""

    def run(self, source: str, args: str) -> str:
        time.sleep = _sleep
        random.seed()  # the generator's state was stored with the modules
        loop = guest.GuestLoop()
        asyncio.set_event_loop(loop)
        try:
            if args == "null":  # it is not to be run
                return programs.check(source)
            engine = guest.GuestEngine(wit_world.send, wit_world.recv, loop)
            return programs.run(source, args, engine, loop)
        except programs.Raised as raised:
            raise componentize_py_types.Err(str(raised)) from None
