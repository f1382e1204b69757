"""Tiers below the pool: places in host memory and files, one by one, then at random beside a plain model."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import headway as hw
from headway.kv.allocator import Allocator, Load, Save
from headway.kv.pool import HostPool
from headway.kv.tensor_pool import TensorPool
from headway.kv.tiers import page_folder
from headway.kv.tiers.host_tier import HostTier
from headway.kv.tiers.page_folder import HEADER, PageFolder
from headway.kv.tiers.page_store import HostPlaces, PageName, PageStore, PlaceMemory
from headway.kv.tiers.tensor_places import TensorPlaces
from support.properties import examples

SIZES: dict[str, Any] = {"layers": 2, "page_size": 2, "kv_heads": 1, "head_dim": 2}
SCOPE, OTHER = bytes(32), bytes([1]) * 32


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


def host_pool(pages: int) -> HostPool:
    return HostPool(**SIZES, pages=pages, inv_freq=np.ones(1, np.float32))


def torch_pool(pages: int) -> TensorPool:
    return TensorPool(**SIZES, pages=pages, dtype=torch.bfloat16, device=torch.device("cpu"))


def numbered(pool: HostPool | TensorPool, pages: Sequence[int], contents: Sequence[int]) -> None:
    """Fill pages, each with a number of its own."""
    for page, number in zip(pages, contents, strict=True):
        pool.raw[:, :, page] = number


def found_in(pool: HostPool | TensorPool, page: int) -> set[float]:
    return set(np.asarray(pool.raw[:, :, page].ravel().tolist()))


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [host_pool, torch_pool])
def test_pages_leave_and_come_back_as_they_were(make: Callable[[int], Any]) -> None:
    pool = make(6)
    store = PageStore(pool.new_places(4), 4)
    names = [PageName(key(n), 0) for n in range(3)]
    numbered(pool, [1, 2, 3], [7, 8, 9])
    pool.apply([Save((1, 2, 3), store, (3, 0, 2), tuple(names))])
    pool.raw[:] = 0
    pool.apply([Load(store, (2, 3), (names[2], names[0]), (6, 4))])
    assert [found_in(pool, page) for page in (4, 5, 6)] == [{7}, {0}, {9}]
    with pytest.raises(hw.PassFailed, match="no longer"):
        pool.apply([Load(store, (0,), (names[0],), (5,))])


@pytest.mark.parametrize("make", [host_pool, torch_pool])
def test_a_page_is_the_same_after_it_was_bytes(make: Callable[[int], Any]) -> None:
    pool = make(4)
    rng = np.random.default_rng(0)
    for page in (1, 2):
        numbers = rng.integers(0, 100, tuple(pool.raw[:, :, page].shape))
        pool.raw[:, :, page] = torch.tensor(numbers) if make is torch_pool else numbers
    memory = pool.new_places(2)
    memory.write([0, 1], pool.read([1, 2]))
    assert len(memory.to_bytes(0)) == memory.page_bytes == pool.page_bytes
    pool.write([4, 3], memory.from_bytes([memory.to_bytes(0), memory.to_bytes(1)]))
    assert (pool.raw[:, :, 4] == pool.raw[:, :, 1]).all()
    assert (pool.raw[:, :, 3] == pool.raw[:, :, 2]).all()


class Recorded:
    """Stands in for a stream of copies, and notes who waits for which."""

    def __init__(self) -> None:
        self.marks, self.waited, self.finished = 0, list[int](), list[int]()

    def after_steps(self) -> Any:
        return threading.Lock()

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def wait(self, mark: int) -> None:
        self.waited.append(mark)

    def finish(self, mark: int) -> None:
        self.finished.append(mark)


def test_steps_wait_only_for_copies_of_what_they_read_or_overwrite() -> None:
    pool = torch_pool(6)
    places = pool.new_places(6)
    places._stream = stream = Recorded()
    for n in range(3):
        places.write([n], pool.read([n + 1]))
    assert stream.waited == [1], "the third page goes into the half that the first one has left"
    places.read([2, 1])
    assert sorted(stream.waited[1:]) == [2, 3]
    places.to_bytes(0)
    assert stream.finished == [1], "the host reads what has arrived"


def test_what_cannot_be_written_is_a_miss_and_is_forgotten() -> None:
    pool, broken = host_pool(4), [True]

    class Full(HostPlaces):
        def write(self, places: Sequence[int], data: np.ndarray) -> None:
            if broken[0]:
                raise MemoryError("no room")
            super().write(places, data)

    store = PageStore(Full(2, pool.page_shape, np.dtype(np.float32)), 2)
    tier = HostTier(store, 2)
    (save,) = tier.keep([(1, key(1))])
    pool.apply([save])
    assert store.errors == 1
    with tier.lent([key(1)]) as places, pytest.raises(hw.PassFailed):
        pool.apply(tier.load([key(1)], places, [2]))
    broken[0] = False
    pool.apply(tier.keep([(3, key(3))]))
    assert (tier.has(key(1)), tier.has(key(3))) == (False, True)
    tier.check()


# -- which pages are kept ----------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first_and_lent_ones_not_at_all() -> None:
    tier = HostTier(PageStore(host_pool(1).new_places(3), 3), 3)
    tier.keep([(1, key(1)), (2, key(2)), (3, key(3))])
    with tier.lent([key(1)]):
        tier.keep([(4, key(4)), (5, key(5)), (6, key(6))])
    assert [n for n in range(1, 7) if tier.has(key(n))] == [1, 5, 6]
    with tier.lent([key(1), key(5), key(6)]):
        assert tier.keep([(7, key(7))]) == []
    assert tier.dropped == 1
    tier.keep([(8, key(8))])
    assert [n for n in range(1, 9) if tier.has(key(n))] == [1, 5, 8], "of a prefix, the last page goes first"


def test_a_page_that_is_kept_already_is_not_copied_again() -> None:
    tier = HostTier(PageStore(host_pool(1).new_places(2), 2), 2)
    assert len(tier.keep([(1, key(1))])) == 1
    assert tier.keep([(2, key(1))]) == []
    tier.clear()
    assert len(tier.keep([(2, key(1))])) == 1


class Machine(RuleBasedStateMachine):
    """An allocator with a host tier and a real pool: a key never shows another key's contents, whatever is evicted,
    brought back, dropped or cannot be written, and in whatever order the device is told."""

    places, pages = 4, 5

    def __init__(self) -> None:
        super().__init__()
        self.pool = host_pool(self.pages)
        self.spilled: dict[bytes, bytes] = {}
        self.broken = False
        memory = self.pool.new_places(self.places)
        real = memory.write

        def write(places: Sequence[int], data: np.ndarray) -> None:
            if self.broken:
                raise MemoryError("no room")
            real(places, data)

        memory.write = write  # type: ignore[method-assign]
        self.store = PageStore(memory, self.places, self.spilled.__setitem__)
        self.tier = HostTier(self.store, self.places)
        self.allocator = Allocator(self.pages)
        self.allocator.on_evicted = self.tier.keep
        self.held: list[tuple[int, int]] = []  # page, what is in it
        self.next = 1

    @rule(n=st.integers(1, 3))
    def compute(self, n: int) -> None:
        """New pages are written, in the order of edits, and found by their keys from then on."""
        if n > self.allocator.available:
            return
        for page in self.allocator.take(n):
            self.work()
            numbered(self.pool, [page], [self.next])
            self.allocator.register(page, key(self.next))
            self.held.append((page, self.next))
            self.next += 1

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def drop(self, which: int) -> None:
        page, _ = self.held.pop(which % len(self.held))
        self.allocator.drop([page])

    @precondition(lambda self: self.next > 1)
    @rule(wanted=st.lists(st.integers(1, 100), min_size=1, max_size=3), more=st.integers(0, 2))
    def look_up(self, wanted: list[int], more: int) -> None:
        """Bring back what the tier has, beside fresh pages that may evict others."""
        numbers = list(dict.fromkeys(1 + n % (self.next - 1) for n in wanted))
        away = [n for n in numbers if self.allocator.find(key(n)) is None and self.tier.has(key(n))]
        here = [n for n in numbers if (page := self.allocator.find(key(n))) is not None]
        for n in here:
            page = self.allocator.find(key(n))
            assert page is not None
            self.allocator.share([page])
            self.held.append((page, n))
        if len(away) + more > self.allocator.available:
            return
        with self.tier.lent([key(n) for n in away]) as places:
            pages = self.allocator.take(len(away) + more)
            for edit in self.tier.load([key(n) for n in away], places, pages[: len(away)]):
                self.allocator.edit(edit)
        for page, n in zip(pages, away, strict=False):
            self.allocator.register(page, key(n))
            self.held.append((page, n))
        self.allocator.drop(pages[len(away) :])

    @rule()
    def clear(self) -> None:
        self.allocator.clear_cache()
        self.tier.clear()

    @rule(broken=st.booleans())
    def break_or_mend(self, broken: bool) -> None:
        self.broken = broken

    @rule()
    def work(self) -> None:
        """The device does what was noted; a page that was missed is found no more."""
        for edit in self.allocator.take_edits():
            try:
                self.pool.apply([edit])
            except hw.PassFailed:
                assert isinstance(edit, Load)
                for page in edit.pages:
                    missed = self.allocator.key_of(page)
                    if missed is not None:
                        self.tier.forget(missed)
                    self.allocator.forget(page)
                    self.held = [(p, -1 if p == page else n) for p, n in self.held]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.tier.check()
        self.allocator.check([[page] for page, _ in self.held])
        assert self.tier.pages <= self.places

    def teardown(self) -> None:
        self.work()
        for page, n in self.held:
            assert n < 0 or found_in(self.pool, page) == {n}
        for name, page in self.spilled.items():
            assert set(np.frombuffer(page, np.float32)) == {int.from_bytes(name, "little")}


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


# -- files -------------------------------------------------------------------------------------------------------------

PAGE = 64


def page_of(n: int) -> bytes:
    return bytes([n]) * PAGE


class Files:
    """Folders over one directory, each closed at the end."""

    def __init__(self, where: Path) -> None:
        self.where, self.opened = where, list[PageFolder]()

    def open(self, pages: int = 100, scope: bytes = SCOPE) -> PageFolder:
        self.opened.append(PageFolder(self.where, pages * (PAGE + HEADER), PAGE, scope))
        return self.opened[-1]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.where.glob("*.page"))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path / "pages")
    yield made
    for folder in made.opened:
        folder.close()


def read(folder: PageFolder, *numbers: int) -> dict[int, bytes]:
    """What comes back, by number."""
    done, found = threading.Event(), dict[bytes, bytes]()

    def take(pages: dict[bytes, bytes]) -> None:
        found.update(pages)
        done.set()

    folder.fetch([key(n) for n in numbers], take)
    assert done.wait(30)
    return {int.from_bytes(name, "little"): page for name, page in found.items()}


def written(files: Files, *numbers: int, **how: Any) -> None:
    """Have these in files, by an engine before."""
    folder = files.open(**how)
    for n in numbers:
        folder.keep(key(n), page_of(n))
    folder.close()


def test_files_outlive_the_engine_that_wrote_them(files: Files) -> None:
    written(files, 1, 2)
    folder = files.open()
    assert (folder.pages, folder.has(key(1)), folder.has(key(3))) == (2, True, False)
    assert read(folder, 1, 2, 3) == {1: page_of(1), 2: page_of(2)}
    assert folder.page_seconds is not None


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_files_belong_to_the_user_alone(files: Files) -> None:
    written(files, 1)
    (name,) = files.names()
    assert stat.S_IMODE(files.where.stat().st_mode) == 0o700
    assert stat.S_IMODE((files.where / name).stat().st_mode) == 0o600
    files.where.chmod(0o777)
    with pytest.raises(hw.InvalidInput, match="others can write to it"):
        files.open()


def test_pages_of_other_weights_are_not_found_and_count(files: Files) -> None:
    written(files, 1)
    written(files, 1, 2, scope=OTHER)
    folder = files.open()
    assert (folder.pages, folder.has(key(1)), folder.has(key(2))) == (3, True, False)
    folder.use_scope(OTHER)
    assert read(folder, 1, 2) == {1: page_of(1), 2: page_of(2)}
    folder.clear()
    assert not folder.has(key(1))
    folder.close()
    assert [name[:64] for name in files.names()] == [SCOPE.hex()]


def test_there_are_never_more_bytes_than_asked_for_and_the_least_recently_used_go(files: Files) -> None:
    written(files, 1, 2, 3, 4, pages=3)
    assert len(files.names()) == 3
    for age, name in enumerate(reversed(files.names())):
        os.utime(files.where / name, (1000 + age, 1000 + age))
    oldest = files.names()[-1]
    folder = files.open(pages=2)
    assert folder.pages == 2
    assert folder.bytes == 2 * (PAGE + HEADER)
    assert oldest not in files.names()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, other: path.write_bytes(b""),
        lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
        lambda path, other: path.write_bytes(path.read_bytes() + b"x"),
        lambda path, other: path.write_bytes(path.read_bytes()[:-1] + b"x"),
        lambda path, other: path.write_bytes(b"x" + path.read_bytes()[1:]),
        lambda path, other: path.write_bytes(other.read_bytes()),
        lambda path, other: path.chmod(0o666),
    ],
    ids=["empty", "short", "long", "flipped", "not ours", "another page's", "writable by others"],
)
def test_a_damaged_file_is_counted_and_deleted(files: Files, spoil: Callable[[Path, Path], object]) -> None:
    written(files, 1, 2)
    first, second = (files.where / name for name in files.names())
    bad = 1 if key(1).hex() in first.name else 2
    spoil(first, second)
    folder = files.open()
    assert read(folder, bad, 3 - bad) == {}, "what follows a page that is missing is of no use"
    assert (folder.damaged, folder.has(key(bad)), first.exists()) == (1, False, False)
    assert read(folder, 3 - bad) == {3 - bad: page_of(3 - bad)}


def test_files_of_others_are_left_alone(files: Files) -> None:
    written(files, 1)
    (files.where / "notes.txt").write_text("mine")
    (files.where / ("0" * 128 + ".page")).mkdir()
    folder = files.open(pages=0)
    assert folder.pages == 0
    assert sorted(path.name for path in files.where.iterdir()) == ["0" * 128 + ".page", "notes.txt"]


def test_a_link_is_not_followed(files: Files, tmp_path: Path) -> None:
    written(files, 1)
    (name,) = files.names()
    (files.where / name).rename(tmp_path / "elsewhere")
    folder = files.open()
    (files.where / name).symlink_to(tmp_path / "elsewhere")
    assert not folder.has(key(1))
    assert read(folder, 1) == {}
    assert (tmp_path / "elsewhere").exists()


def test_a_disk_that_fails_is_counted_and_nothing_else_happens(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_folder.os, "replace", full)
    written(files, 1, 2)
    assert files.opened[0].errors == 2
    assert list(files.where.iterdir()) == []


def test_a_file_that_is_written_while_all_are_cleared_goes_too(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, replace = files.open(), os.replace

    def cleared(*paths: Any) -> None:
        replace(*paths)
        folder.clear()

    monkeypatch.setattr(page_folder.os, "replace", cleared)
    folder.keep(key(1), page_of(1))
    folder.close()
    assert (folder.pages, folder.written, list(files.where.iterdir())) == (0, 0, [])


def test_what_comes_faster_than_it_can_be_written_is_dropped(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_folder, "WAITING", PAGE)
    folder = files.open()
    with folder._changed:  # the thread waits
        for n in range(1, 5):
            folder.keep(key(n), page_of(n))
        assert folder.dropped == 3
    folder.close()
    assert len(files.names()) == 1


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(hw.InvalidInput, match="cannot be used"):
        PageFolder(tmp_path / "file", 1 << 20, PAGE, SCOPE)


def test_both_memories_are_what_the_store_needs() -> None:
    memories: list[PlaceMemory] = [
        HostPlaces(2, (1, 2, 2, 1, 2), np.dtype(np.float32)),
        TensorPlaces(2, (1, 2, 2, 1, 2), torch.float32, torch.device("cpu")),
    ]
    assert [memory.page_bytes for memory in memories] == [32, 32]
