"""All programs of a server: started within the quotas of their key, stopped, found, told messages, by topic too."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.sandbox.confinement import confinement
from headway.sandbox.limits import ProgramLimits
from headway.sandbox.runner import Confined, Ended, Sandbox
from headway.server import logs
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.programs.run import Messages, Run
from headway.server.programs.store import InstalledPrograms, check_source
from headway.server.sessions.sockets import UnixLink

if TYPE_CHECKING:
    from headway.server.serving import Serving

HOUR = 3600.0
READ_SECONDS = 20.0  # that reading a source may take before it is installed
OUT_OF_CPU = (-signal.SIGXCPU, 128 + signal.SIGXCPU)  # exit statuses: a process's own, and bubblewrap's for it
ENDED = ("bye", "lost")  # reasons of a session that end with its program


class Programs:
    """The programs of one server."""

    def __init__(self, serving: Serving, sandbox: Sandbox, confinement: str) -> None:
        self._serving, self._sandbox, self.confinement = serving, sandbox, confinement
        self._runs: dict[str, Run] = {}  # oldest first
        self._used: dict[str, deque[tuple[float, float]]] = {}  # of a key: when, seconds of CPU time
        self._reading_turn = asyncio.Lock()
        self._reading = ("", 0.0)  # whose source is read before it is kept, and what that may use
        self.installed = InstalledPrograms(serving.settings)

    @classmethod
    async def prepared(cls, serving: Serving, log: Callable[[str], None]) -> Programs:
        """Those of a server's settings, with the worker ready before the first program comes."""
        settings = serving.settings
        assert settings.programs is not None
        confined = await asyncio.to_thread(confinement, settings.programs, unconfined=settings.unconfined, log=log)
        programs = cls(serving, Sandbox(confined.command), confined.name)
        await programs._sandbox.open()
        return programs

    # -- starting ----------------------------------------------------------------------------------------------------

    async def check_model(self, name: str | None) -> None:
        """Raise an `ApiError` unless a program may run beside the model of this name."""
        model, adapter = await self._serving.models.find(name)
        if adapter is not None:
            raise bad_request(
                f"{adapter!r} is an adapter; run the program beside {model.name!r}, and pass adapter= in it", "model"
            )

    def start(
        self,
        tenant: Tenant,
        source: str,
        args: dict[str, Any],
        name: str | None = None,
        model: str | None = None,
    ) -> Run:
        """Start a program of a key; raises an `ApiError` when that exceeds its quotas."""
        settings = self._serving.settings
        check_source(source, settings)
        if (state := self._serving.state) != "ready":
            raise ApiError(503, f"the server is {state}; programs cannot be started", code=state)
        most = tenant.limits.max_programs or settings.max_programs
        running = sum(run.is_running for run in self.runs(tenant))
        if running >= most:
            raise ApiError(
                429,
                f"this key has {running} programs running and may have {most}; wait, or stop one",
                code="queue_full",
            )
        granted = min(settings.max_program_cpu, self._cpu_left(tenant))
        run = Run(self, tenant, settings, granted, name=name, model=model)
        self._runs[run.id] = run
        limits = ProgramLimits(settings.max_program_memory, granted, settings.max_body_bytes)
        run.task = asyncio.create_task(self._run(run, source, args, limits))
        logs.info("program started", tenant=tenant.name, program=run.id, **({"name": name} if name else {}))
        return run

    async def install(self, tenant: Tenant, name: str, source: str) -> None:
        """Keep a source under a name, if it is Python, which is seen where programs run; raises an `ApiError`."""
        self.installed.check(tenant, name, source)
        settings = self._serving.settings
        async with self._reading_turn:
            self._reading = (tenant.name, granted := min(settings.max_program_cpu, self._cpu_left(tenant)))
            limits = ProgramLimits(settings.max_program_memory, granted, settings.max_body_bytes)
            ended, begun = Ended(None, None, 0.0), time.monotonic()
            try:
                ended = await self._sandbox.read(source, limits, READ_SECONDS)
            finally:
                self._reading = ("", 0.0)
                self._charge(tenant, ended, min(granted, time.monotonic() - begun))
        if ended.status is None:
            raise ApiError(503, "the process that reads programs has ended; try again", code="closed")
        match ended.outcome:
            case {"returned": _}:
                self.installed.install(tenant, name, source)
            case {"raised": why}:
                raise bad_request(f"the program is not valid Python: {why}", "source")
            case _:
                why = (ended.outcome or {"stopped": f"it took more than {READ_SECONDS:g} seconds"})["stopped"]
                raise bad_request(f"the program cannot be read: {why}", "source")

    def _cpu_left(self, tenant: Tenant) -> float:
        """Seconds of CPU time that a key may still use within the hour, besides what its running programs may; raises
        when there are none."""
        most = tenant.limits.program_cpu or self._serving.settings.max_key_cpu
        used, now = self._used.setdefault(tenant.name, deque()), time.monotonic()
        while used and used[0][0] < now - HOUR:
            used.popleft()
        spent, granted = sum(seconds for _, seconds in used), sum(run.granted for run in self.runs(tenant))
        granted += self._reading[1] if self._reading[0] == tenant.name else 0.0
        if spent >= most:
            wait = int(used[0][0] + HOUR - now) + 1
            raise ApiError(
                429,
                f"the programs of this key have used its {most:g} seconds of CPU time an hour; try again in {wait} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )
        if spent + granted >= most:
            raise ApiError(
                429,
                f"the programs of this key have used {spent:g} of its {most:g} seconds of CPU time an hour, and those "
                "that run may use the rest; wait for one of them, or stop one",
                code="queue_full",
            )
        return most - spent - granted

    def _charge(self, tenant: Tenant, ended: Ended, most: float) -> None:
        """Count what a program has used against the quota of its key: at most so much, where nobody knows."""
        if ended.status is None or (ended.outcome is None and self.confinement != "WebAssembly"):
            ended.cpu = max(ended.cpu, most)
        self._used.setdefault(tenant.name, deque()).append((time.monotonic(), ended.cpu))

    async def _run(self, run: Run, source: str, args: dict[str, Any], limits: ProgramLimits) -> None:
        """From its process's start to the release of everything it held."""
        settings = self._serving.settings

        def cancel(why: ApiError) -> None:
            run.stop(why.message)

        self._serving.cancels.add(cancel)
        timer = asyncio.get_running_loop().call_later(
            settings.max_program_seconds, run.stop, f"it ran longer than {settings.max_program_seconds:g} seconds"
        )
        ended = Ended(None, None, 0.0)
        reason = None
        try:
            confined = await self._sandbox.start(source, args, limits)
            stopper = asyncio.create_task(_kill_when_stopped(run, confined))
            session = asyncio.create_task(self._serve_session(run, confined))
            try:
                ended = await confined.ended()
                reason = await session
            finally:
                stopper.cancel()
        except Exception as error:
            logs.failure("a program could not be run", error, with_text=settings.log_prompts)
            run.why = run.why or "the sandbox failed; the server's log has the cause"
        finally:
            timer.cancel()
            self._serving.cancels.discard(cancel)
            self._charge(run.tenant, ended, min(run.granted, run.elapsed))
            run.granted = 0.0
            await run.finish(_outcome(run, ended, reason), ended.cpu)
            logs.info("program ended", tenant=run.tenant.name, program=run.id, status=run.status, cpu=ended.cpu)
            self._forget_old(run.tenant)

    async def _serve_session(self, run: Run, confined: Confined) -> str | None:
        """Serve its session; why it was closed, if the program is to blame."""
        reader, writer = await asyncio.open_unix_connection(sock=confined.session)
        link = UnixLink(reader, writer, self._serving.settings.max_body_bytes)
        try:
            closed = await self._serving.sessions.serve(link, run.tenant, run)
        finally:
            writer.close()
        if closed is None or closed.reason in ENDED:
            return None
        return f"its session was closed ({closed.reason}): {closed.message}"

    def _forget_old(self, tenant: Tenant) -> None:
        """Keep the output of the latest programs of a key only."""
        settings = self._serving.settings
        ended = [run for run in self.runs(tenant) if not run.is_running]
        kept = sum(run.output.bytes for run in ended)
        while ended and (len(ended) > settings.max_kept_programs or kept > settings.max_kept_bytes):
            oldest = ended.pop(0)
            kept -= oldest.output.bytes
            del self._runs[oldest.id]

    # -- those there are ---------------------------------------------------------------------------------------------

    def runs(self, tenant: Tenant) -> list[Run]:
        """The programs of a key, oldest first."""
        return [run for run in self._runs.values() if run.tenant.name == tenant.name]

    def find(self, tenant: Tenant, id: str) -> Run:
        """A program of a key; raises a 404."""
        run = self._runs.get(id)
        if run is None or run.tenant.name != tenant.name:
            raise ApiError(404, "this key has no program with this id", code="program_not_found")
        return run

    def subscribers(self, tenant: Tenant, topic: str) -> list[Messages]:
        """Where the messages of a topic go within a key."""
        return [run.topics[topic] for run in self.runs(tenant) if topic in run.topics]

    async def close(self) -> None:
        """Stop every program, and the worker."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for run in self._runs.values():
            run.stop("the server is shutting down")
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sandbox.close()


async def open_programs(serving: Serving) -> Programs | None:
    """The programs of a server that allows them; raises where they cannot be confined."""
    if serving.settings.programs is None:
        return None
    programs = await Programs.prepared(serving, logs.info)
    logs.info("programs are allowed", confinement=programs.confinement)
    if programs.confinement == "none":
        logs.warn("programs are not confined: they may do everything that this user may")
    return programs


async def _kill_when_stopped(run: Run, confined: Confined) -> None:
    await run.stopping.wait()
    await run.output.release()
    await confined.kill()


def _outcome(run: Run, ended: Ended, reason: str | None) -> dict[str, Any]:
    """How it ended: what the server decided comes before what the program says."""
    if run.why is not None:
        return {"stopped": run.why}
    if reason is not None:
        return {"stopped": reason}
    if ended.outcome is not None:
        return ended.outcome
    if ended.status is None:
        return {"stopped": "the process that starts programs has ended, and with it this program"}
    if ended.status in OUT_OF_CPU:
        return {"stopped": "it used more CPU time than it may"}
    how = f"by signal {-ended.status}" if ended.status < 0 else f"with status {ended.status}"
    return {"stopped": f"its process ended {how}"}
