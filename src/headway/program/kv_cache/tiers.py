"""Tiers below the pool's prefix cache, as an engine is asked for them: host memory, and a folder below it."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.system.device import CPU
from headway.base.text import format_bytes, short_repr
from headway.kv.tiers.host_tier import HostTier
from headway.kv.tiers.page_folder import PageFolder, check_limit
from headway.kv.tiers.page_store import AT_ONCE, PageStore
from headway.program.kv_cache.snapshots import kv_type, maker
from headway.runtime.memory import amount_bytes, read_memory, running_out
from headway.runtime.scheduler.cache_tiers import CacheTiers

if TYPE_CHECKING:
    from headway.program.engine import Engine

FOLDER_SIZE = "16G"
STAGING = 3 * AT_ONCE  # bytes of a CUDA device that pages pass through


@dataclass(frozen=True)
class TierSizes:
    """What an engine was asked for, checked: bytes of host memory, 0 for none, and of a folder."""

    host: int = 0
    folder: Path | None = None
    folder_bytes: int = 0

    @classmethod
    def of(cls, host: int | str | None, folder: str | Path | None, folder_size: int | str | None) -> TierSizes:
        """Read the options, before anything is loaded."""
        if folder is not None and not isinstance(folder, str | Path):
            raise WrongType(f"cache_folder is {short_repr(folder)}; it must be a folder")
        if folder is None and folder_size is not None:
            raise InvalidInput(f"cache_folder_size is {short_repr(folder_size)} and there is no cache_folder; give one")
        if host is None and folder is not None:
            raise InvalidInput(
                f"cache_folder is {short_repr(str(folder))} and there is no cache_host; pages reach files by way of "
                'host memory: give cache_host too, such as "2G"'
            )
        if host is None:
            return cls()
        size, total = amount_bytes(host, "cache_host"), read_memory(CPU).total
        if size > total:
            raise InvalidInput(
                f"cache_host is {format_bytes(size)} and this machine has {format_bytes(total)}; give less"
            )
        below = FOLDER_SIZE if folder_size is None else folder_size
        where = None if folder is None else Path(folder).expanduser()
        return cls(size, where, 0 if where is None else amount_bytes(below, "cache_folder_size"))

    def check(self, *, tensor_parallel: int, has_runner: bool) -> None:
        """Refuse engines whose pages are not all in this process."""
        if self.host and tensor_parallel > 1:
            raise Unsupported(
                f"cache_host is not supported with tensor_parallel ({tensor_parallel}): pages are in several "
                "processes; leave out one of them"
            )
        if self.host and has_runner:
            raise Unsupported("cache_host is for engines with a runner of their own; this one was given another")


def open_tiers(engine: Engine, sizes: TierSizes) -> CacheTiers | None:
    """Take the memory, and open the folder. None if nothing was asked for."""
    if not sizes.host:
        return None
    pool = engine._pool
    assert pool is not None
    page = pool.page_bytes
    if not page:
        raise Unsupported("cache_host is for models with attention; the pages of this one take no memory")
    if sizes.host < page:
        raise InvalidInput(
            f"cache_host is {format_bytes(sizes.host)} and a page takes {format_bytes(page)}; give room for one"
        )
    if sizes.folder is not None and engine.config.recurrent_layers:
        raise Unsupported(
            "cache_folder is for models without recurrent layers, whose state is not in pages; leave it out"
        )
    places = sizes.host // page
    with running_out(engine._backend.decoder.device, f"taking {format_bytes(sizes.host)} of host memory (cache_host)"):
        memory = pool.new_places(places)
    folder = None
    if sizes.folder is not None:
        check_limit(sizes.folder_bytes, page)
        folder = PageFolder(sizes.folder, sizes.folder_bytes, page, page_scope(engine))
    store = PageStore(memory, places) if folder is None else PageStore(memory, places, folder.keep)
    return CacheTiers(HostTier(store, places), folder, engine.page_size)


def page_scope(engine: Engine) -> bytes:
    """What pages depend on besides their keys: weights, sizes and types; where bits matter, what computed them."""
    pool = engine._pool
    shape = () if pool is None else pool.page_shape
    exact = maker(engine) if engine.deterministic else ""
    parts = (engine.fingerprint, engine.page_size, kv_type(engine), shape, exact)
    return blake2b(repr(parts).encode(), digest_size=32, person=b"headway-scope").digest()
