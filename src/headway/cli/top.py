"""`headway top`: watch the engines of a script or server; live on a terminal, one line per second in a pipe."""

from __future__ import annotations

import runpy
import statistics
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headway.base.errors import InvalidInput
from headway.cli.flags.declare import Argument, Option

if TYPE_CHECKING:
    from headway.program.engine import Engine, EngineStats

REFRESH_RATE = 8  # per second
LINE_SECONDS = 1.0  # between two lines in a pipe
RATE_SECONDS = 2.0  # window of the tokens/s rate
STEPS = 32  # shown in the step-time chart
BAR = 48  # characters
HEIGHTS = "▁▂▃▄▅▆▇█"


def top(
    script: Annotated[Path | None, Argument(metavar="SCRIPT.py", help="A Python file that creates an engine.")] = None,
    arguments: Annotated[list[str] | None, Argument(metavar="ARGS", help="Arguments of the script.")] = None,
    *,
    url: Annotated[
        str | None,
        Option("--url", metavar="URL", help="Watch a server, with its key in HEADWAY_API_KEY."),
    ] = None,
) -> int:
    """Run a script and show its engines: queue, batches, tokens/s, pages, prefix-cache hits, step times.

    On a terminal the view stays below the script's output. In a pipe it is a line per second, on standard error.

    With --url http://127.0.0.1:8000 it shows a server's engine until the server stops.
    """
    if (script is None) == (url is None):
        raise InvalidInput("give either a Python file that creates an engine, or --url with a server's address")
    if url is not None:
        watch_server(url)
        return 0
    assert script is not None
    if not script.is_file():
        if str(script).startswith(("http:", "https:")):
            raise InvalidInput("a server's address needs --url, as in `headway top --url http://127.0.0.1:8000`")
        raise InvalidInput(f"there is no script {str(script)!r}; give a Python file that creates an engine")
    code = 0
    try:
        with _showing(TopView()):
            names = run_script(
                script, arguments or []
            )  # kept until the last refresh, so that its engines are still alive
        del names
    except SystemExit as end:
        code = _exit_code(end)
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:  # from the script: shown as Python shows it
        _show_error(error, script)
        code = 1
    return code


def run_script(script: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a file as `python SCRIPT.py ARGS` would, in this thread, and return its globals."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        return runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def watch_server(url: str) -> None:
    """Show a server's engine until the server stops."""
    from headway.cli.top_server import ServerWatch

    view = TopView(own=False)
    watch = ServerWatch(url)
    view.watches.append(watch)
    with _showing(view):
        while not watch.over:
            time.sleep(1 / REFRESH_RATE)


class EngineFigures:
    """What is shown of one engine, from its stats."""

    def __init__(self, name: str, stats: EngineStats) -> None:
        self.name, self.stats = name, stats
        self.over = False
        self.seconds: deque[float] = deque(maxlen=STEPS)  # of the last steps
        self.batch = 0  # passes of the last step
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), stats.tokens)])

    def refresh(self) -> None:
        """Read the engine's current stats."""
        raise NotImplementedError

    def mark(self) -> None:
        """Record the token count, for the rate."""
        now = time.monotonic()
        self._marks.append((now, self.stats.tokens))
        while len(self._marks) > 2 and self._marks[0][0] < now - RATE_SECONDS:
            self._marks.popleft()

    @property
    def tokens_per_second(self) -> float:
        (began, first), (ended, last) = self._marks[0], self._marks[-1]
        return 0.0 if self.over else (last - first) / max(ended - began, 1e-3)

    @property
    def step_times(self) -> str:
        """The time of the last step and the median of recent ones."""
        if not self.seconds:
            return "no step yet"
        return f"last {self.seconds[-1] * 1e3:.1f} ms, median {statistics.median(self.seconds) * 1e3:.1f} ms"

    def work(self) -> str:
        s = self.stats
        return (
            f"queue {s.queued} · batch {self.batch} (mean {s.batch_size_mean:.1f}) · "
            f"{self.tokens_per_second:.0f} tokens/s · {s.tokens} tokens in {s.steps} steps"
        )

    def pages(self) -> str:
        s = self.stats
        return f"{s.pages_held} held · {s.pages_cached} cached · {s.pages_free} free of {s.pages_total} pages"

    def events(self) -> str:
        s = self.stats
        return f"{s.cache_hits} cache hits · {s.pages_trimmed} pages trimmed · {s.preemptions} preempted"

    def line(self) -> str:
        """Everything in one line."""
        state = "closed · " if self.over else ""
        return f"{self.name} · {state}{self.work()} · {self.pages()} · {self.events()} · {self.step_times}"


class EngineWatch(EngineFigures):
    """One engine of this process. Holds only a weak reference to it."""

    def __init__(self, engine: Engine, number: int) -> None:
        info = engine.info
        super().__init__(f"{number}  {info.name} · {info.dtype} · {info.device}", engine.stats())
        self.engine = weakref.ref(engine)
        self._events = engine.events()

    def refresh(self) -> None:
        if self.over:
            return
        engine = self.engine()
        while (event := self._events.poll()) is not None:
            self.seconds.append(event.seconds)
            self.batch = event.passes
        if engine is not None:
            self.stats = engine.stats()
        self.over = engine is None or not engine.alive
        if self.over:
            self._events.close()
            del self._events  # it references the loop, which references the model
        self.mark()


class TopView:
    """The watched engines: all those of this process, or the ones in `watches`."""

    def __init__(self, *, own: bool = True) -> None:
        self.watches: list[EngineFigures] = []
        self._own = own

    def refresh(self) -> None:
        if self._own:
            self._find()
        for watch in self.watches:
            watch.refresh()

    def _find(self) -> None:
        from headway.program.engine import engines

        known = [watch.engine() for watch in self.watches if isinstance(watch, EngineWatch)]
        for engine in engines():
            if not any(engine is other for other in known):
                self.watches.append(EngineWatch(engine, len(self.watches) + 1))

    def render(self) -> Any:
        """The refreshed view, for a terminal."""
        from rich.console import Group
        from rich.text import Text

        self.refresh()
        if not self.watches:
            return Text("no engine yet", style="dim")
        return Group(*(_panel(watch) for watch in self.watches))


def _panel(watch: EngineFigures) -> Any:
    from rich.panel import Panel
    from rich.text import Text

    text = Text(f"{watch.work()}\n")
    for part, style, char in _bar(watch.stats):
        text.append(char * part, style=style)
    text.append(f"  {watch.pages()}\n{watch.events()}\n")
    text.append(_heights(watch.seconds), style="cyan")
    text.append(f"  steps: {watch.step_times}")
    title = f"{watch.name}{' · closed' if watch.over else ''}"
    return Panel(text, title=Text(title), title_align="left", border_style="dim", expand=False)


def _bar(stats: EngineStats) -> Iterator[tuple[int, str, str]]:
    """Lengths, styles and characters of a bar of held, cached and free pages, BAR characters in all."""
    at = done = 0
    counts = ((stats.pages_held, "green", "█"), (stats.pages_cached, "yellow", "▒"), (stats.pages_free, "dim", "·"))
    for pages, style, char in counts:
        at += pages
        end = round(BAR * at / stats.pages_total)
        yield end - done, style, char
        done = end


def _heights(values: Sequence[float]) -> str:
    """A bar chart of numbers, scaled to the largest."""
    largest = max(values, default=0.0) or 1.0
    return "".join(HEIGHTS[min(int(len(HEIGHTS) * v / largest), len(HEIGHTS) - 1)] for v in values)


@contextmanager
def _showing(view: TopView) -> Iterator[None]:
    """Show the view while the body runs, and once more at the end."""
    view.refresh()  # imports happen here, not while the script runs
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        from headway.cli.terminal.script_output import terminal_behind_output

        with terminal_behind_output() as (terminal, output):
            live = Live(
                get_renderable=view.render,
                console=Console(file=terminal),
                refresh_per_second=REFRESH_RATE,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            with live, output.printed_by(lambda lines: live.console.print(Text.from_ansi(lines), soft_wrap=True)):
                yield
        return
    end = threading.Event()
    thread = threading.Thread(target=_lines, args=(view, end), name="headway-top", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        view.refresh()
        _print_lines(view)


def _lines(view: TopView, end: threading.Event) -> None:
    shown = time.monotonic()
    while not end.wait(1 / REFRESH_RATE):
        view.refresh()
        if time.monotonic() - shown >= LINE_SECONDS:
            shown = time.monotonic()
            _print_lines(view)


def _print_lines(view: TopView) -> None:
    for watch in view.watches:
        print(watch.line(), file=sys.stderr, flush=True)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _show_error(error: BaseException, script: Path) -> None:
    """Print the traceback, starting at the script's own frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
