"""`headway chat`: a conversation in one context, so that every turn prefills only what is new."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidInput
from headway.cli.flags import shared
from headway.cli.flags.declare import with_flags
from headway.cli.flags.shared import Decoding, EngineOptions, open_drafter, open_engine
from headway.cli.terminal.answer import GeneratedAnswer, show_choices, stream, weights
from headway.cli.terminal.render import WordWrapper, counted, emit_json, note, report, write_aside, write_text
from headway.cli.terminal.typed import typed_messages

if TYPE_CHECKING:
    import headway as hw
    from headway.program.chat.reader import ReplyReader

HELP = """/help            this list
/reset           forget the conversation, keep the system message
/system [TEXT]   start over with TEXT as the system message; without TEXT, show it
/tokens          the number of tokens in the conversation
/exit            leave (so does ctrl-D); ctrl-C stops an answer and keeps what there is of it

A pasted block of lines is one message. Tab completes commands."""
EMPTY = {
    "eos": "the answer is empty: the model ended it at once; say more, or try --temperature 1",
    "stop": "the answer is empty: it began with a --stop text",
    "length": "the answer is empty: --max-tokens were spent on reasoning or spaces; raise it",
}
LONG_PROMPT = 1024  # tokens; reading them takes a moment
COMMANDS = ("/exit", "/help", "/reset", "/system", "/tokens")
DECODING = Decoding(max_tokens=512, temperature=None)  # unless flags say otherwise


@with_flags
def chat(
    *,
    engine_options: EngineOptions,
    system: shared.System = None,
    decoding: Decoding = DECODING,
    speculate: shared.Speculate = None,
    quiet: shared.Quiet = False,
    json: shared.Json = False,
) -> None:
    """Chat with the model. In a pipe, every line is a turn; with --json every answer is a line of JSON.

    Without sampling flags, tokens are drawn as the model's generation_config.json says.
    """
    decoding.check()
    model = engine_options.model
    with open_engine(engine_options) as engine, open_drafter(speculate, engine_options) as drafter:
        if engine.chat_template is None:
            raise InvalidInput(f"{model} has no chat template; `headway run --raw` continues text with it")
        session = ChatSession(engine, model, decoding, system, json, drafter)
        if sys.stdin.isatty():
            info = engine.info
            note(f"{model} · {weights(info.format)} · {info.device} · /help lists commands, ctrl-D ends")
        try:
            for line in _messages():
                if not session.take(line.strip()):
                    break
        finally:
            session.close()


@dataclass(eq=False)
class ChatSession:
    """One conversation: its context, and the options of every turn."""

    engine: hw.Engine
    name: str
    decoding: Decoding
    system: str | None
    as_json: bool
    drafter: hw.Drafter | None = None
    ctx: hw.Context = field(init=False)
    partial: str = ""  # what was shown of the answer that is being written

    def __post_init__(self) -> None:
        self.ctx = self._fresh()

    def take(self, line: str) -> bool:
        """Handle one line of input; False when it ends the session."""
        command, _, rest = line.partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/help":
                note(HELP)
            case "/reset":
                self.start_over(self.system)
            case "/system" if rest.strip():
                self.start_over(rest.strip())
            case "/system":
                note(self.system or "there is no system message")
            case "/tokens":
                note(counted(self.ctx.seq_len + len(self.ctx.pending), "token"))
            case _ if command.startswith("/"):
                self._refuse(InvalidInput(f"there is no command {command}; /help lists them"))
            case _:
                self.turn(line)
        return True

    def start_over(self, system: str | None) -> None:
        """Forget the conversation; the next one has `system` as its system message."""
        self.ctx.release()
        self.system = system
        self.ctx = self._fresh()

    def turn(self, text: str) -> None:
        """Answer one message. One that fails leaves the conversation as it was; one that is interrupted stays as far
        as it came."""
        before, self.partial = self.ctx.fork(), ""
        try:
            answer, reasoning = self.engine.run(reply, self, text)
        except (HeadwayError, KeyboardInterrupt) as error:
            self.ctx.release()
            self.ctx = before
            if isinstance(error, KeyboardInterrupt) and sys.stdin.isatty():
                self._keep_partial(text)
            else:
                self._refuse(error)
        else:
            before.release()
            self._show(answer, reasoning)

    def _keep_partial(self, text: str) -> None:
        """Go on with what was shown of an answer that was stopped."""
        write_text("\n")
        if not self.partial.strip():
            note("stopped before the first word; this turn was discarded")
            return
        try:
            self.ctx.user(text)
            self.ctx.assistant(self.partial)
        except HeadwayError as error:  # a template that rewrites earlier messages
            note(f"stopped; the partial answer cannot be kept: {error}")
            self.start_over(self.system)
        else:
            note("stopped; the conversation keeps this part of the answer")

    def close(self) -> None:
        self.ctx.release()

    def _fresh(self) -> hw.Context:
        ctx = self.engine.context()
        if self.system is not None:
            ctx.system(self.system)
        return ctx

    def _refuse(self, error: BaseException) -> None:
        """Report an error and go on; in a pipe, it ends the session."""
        if not sys.stdin.isatty():
            raise error
        report(f"headway: {error}")

    def _show(self, answer: GeneratedAnswer, reasoning: str) -> None:
        if self.as_json:
            emit_json({**answer.to_json(), **({"reasoning": reasoning} if reasoning else {})}, indent=None)
            return
        if not answer.text.endswith("\n"):
            write_text("\n")
        if not answer.text.strip():
            note(EMPTY.get(answer.finish_reason or "", "the answer is empty"))
        show_choices(answer.choices)
        note(answer.figures.line())


async def reply(engine: hw.Engine, session: ChatSession, text: str) -> tuple[GeneratedAnswer, str]:
    """The program of one turn: fill in the message, generate, and return the answer and its reasoning."""
    from headway.program.chat.messages import append_messages, close_message, reply_format
    from headway.program.chat.reader import ReplyReader

    ctx, format = session.ctx, reply_format(engine.chat_template)
    prompt = append_messages(ctx, text)
    if len(ctx.pending) >= LONG_PROMPT and sys.stdin.isatty():
        note(f"reading {counted(len(ctx.pending), 'token')} …")
    wrapper = WordWrapper(sys.stdout.isatty())

    def write(piece: str) -> None:
        session.partial += piece
        if not session.as_json:
            write_text(wrapper.push(piece))

    if format is None:
        answer = await stream(engine, ctx, session.name, session.decoding, write, drafter=session.drafter)
        write_text("" if session.as_json else wrapper.flush())
        return answer, ""
    reader = ReplyReader(engine.tokenizer, format, prompt)
    reader.begin(ctx.text_before)
    printer = ReplyPrinter(reader, write, silent=session.as_json)
    options = {"each": printer.show, "drafter": session.drafter}
    answer = await stream(engine, ctx, session.name, session.decoding, write, **options)
    write_text("" if session.as_json else wrapper.flush())
    if answer.finish_reason != "length":
        close_message(ctx, reader)
    return replace(answer, text=reader.reply.content), reader.reply.reasoning


@dataclass(eq=False)
class ReplyPrinter:
    """Prints a reply as it is parsed: content as is, reasoning dimmed, each on its own lines."""

    reader: ReplyReader
    write: Callable[[str], None]
    silent: bool
    _thinking: bool = False

    def show(self, step: hw.Step) -> None:
        parts = self.reader.push(step)
        if step.finish is not None:
            parts += self.reader.finish()
        for part in parts:
            if not self.silent:
                self._part(part)

    def _part(self, part: object) -> None:
        from headway.text.replies import BadToolCall, Content, Reasoning, ToolCallArguments, ToolCallStart

        match part:
            case Reasoning(text):
                self._thinking = True
                write_aside(text)
                return
            case Content(text) | BadToolCall(text, index=None):
                shown = text
            case ToolCallStart(name=name):
                shown = f"[{name}] "
            case ToolCallArguments(delta=delta):
                shown = delta
            case _:
                return
        if self._thinking:
            self._thinking = False
            write_aside("\n\n")
        self.write(shown)


def _messages() -> Iterator[str]:
    """Messages typed at a terminal, or the lines of a pipe."""
    return typed_messages(COMMANDS) if sys.stdin.isatty() else iter(sys.stdin)
