"""The device fails while it clears, copies or moves pages: who depends on it fails or is computed again, others do not.

The scripted runner gives another token for any wrong slot, so a page whose edit was not done cannot go unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import headway as hw
from headway.kv.allocator import Clear, Copy, Edit, Export, Gather, HostPages, Import
from headway.runtime.edits import carry_out, runs
from headway.testing import ScriptedRunner
from support.scripted import Hand, V, by_hand, check_pages, greedy, numbers, opened, plain


class Sticky(ScriptedRunner):
    """Fails at edits that `broken` picks, after it has done those before them."""

    def __init__(self) -> None:
        super().__init__(V, 16)
        self.broken: Callable[[Edit], bool] = lambda edit: False

    def _edit(self, edit: Edit) -> None:
        if self.broken(edit):
            raise RuntimeError("no memory for it")
        super()._edit(edit)


class Bench(Hand):
    device: Sticky


@pytest.fixture
def hand() -> Iterator[Bench]:
    """8 pages, 64 rows a step."""
    device = Sticky()
    with opened(device, pages=8, max_batch_tokens=64) as engine, by_hand(engine) as hand:
        bench = Bench(hand.engine, hand.step)
        bench.device = device
        yield bench


def drawn(hand: Bench, context: hw.Context, tokens: list[int]) -> int | None:
    execution, handle = greedy(context, tokens)
    hand.until(execution)
    return execution.result(0).token(handle)


def test_a_page_that_cannot_be_cleared_fails_only_the_pass_that_got_it(hand: Bench) -> None:
    before, bad, after = (hand.engine.context() for _ in range(3))
    running = [greedy(c, numbers(20, n)) for n, c in enumerate((before, bad, after))]

    def is_its(edit: Edit) -> bool:
        pages = [p for job in hand.engine._loop.jobs() if job.table is bad._table for p in job.pages]
        return isinstance(edit, Clear) and edit.page in pages

    hand.device.broken = is_its
    assert hand.until(*(e for e, _ in running)) == 1
    with pytest.raises(hw.PassFailed, match=r"while preparing pages \(clear\): no memory"):
        running[1][0].result(0)
    for n in (0, 2):
        execution, handle = running[n]
        assert execution.result(0).token(handle) == plain(numbers(20, n))
    assert bad.seq_len == 0
    hand.device.broken = lambda edit: False
    assert drawn(hand, bad, numbers(20, 1)) == plain(numbers(20, 1))
    check_pages(hand.engine)


def test_a_fork_whose_copy_fails_computes_its_slots_again(hand: Bench) -> None:
    parent = hand.engine.context()
    hand.compute(parent, numbers(20))
    hand.device.broken = lambda edit: isinstance(edit, Copy)
    fork, other = parent.fork(), hand.engine.context()
    mine, _ = greedy(fork, [1])
    theirs, handle = greedy(other, [2])
    assert hand.until(mine, theirs) == 1
    with pytest.raises(hw.PassFailed, match=r"preparing pages \(copy\)"):
        mine.result(0)
    assert theirs.result(0).token(handle) == plain([2])
    assert drawn(hand, fork, [1]) == plain([*numbers(20), 1])  # no copy is needed any more
    assert drawn(hand, parent, [3]) == plain([*numbers(20), 3])
    check_pages(hand.engine)


def test_a_fork_of_a_fork_whose_copy_failed_is_not_right_by_chance(hand: Bench) -> None:
    parent = hand.engine.context()
    hand.compute(parent, numbers(20))
    child = parent.fork()
    grandchild = child.fork()
    hand.device.broken = lambda edit: isinstance(edit, Copy) and edit.target in child._table.held()
    executions = [greedy(child, [1])[0], greedy(grandchild, [1])[0]]
    hand.until(*executions)
    for execution in executions:
        with pytest.raises(hw.PassFailed, match="copy"):
            execution.result(0)
    for context in (child, grandchild):
        assert drawn(hand, context, [5]) == plain([*numbers(20), 5])
    check_pages(hand.engine)


def discarded(hand: Bench, seed: int) -> hw.Context:
    """A context of three pages that can only be copied out, not computed again."""
    context = hand.engine.context(priority=-1)
    hand.compute(context, numbers(48, seed))
    context.inner().discard_pages(0, 1)
    return context


def test_a_context_that_cannot_be_copied_out_is_lost_and_says_so(hand: Bench) -> None:
    victim = discarded(hand, 1)
    hand.device.broken = lambda edit: isinstance(edit, Export)
    big = hand.engine.context(priority=1)
    assert drawn(hand, big, numbers(16 * 7, 2)) == plain(numbers(16 * 7, 2))
    with pytest.raises(hw.PassFailed, match=r"pages are lost.*create a new one.*\(export\)"):
        victim.forward().input([1]).execute()
    with pytest.raises(hw.PassFailed, match="pages are lost"):
        victim.fork()
    victim.release()
    assert drawn(hand, big, [4]) == plain([*numbers(16 * 7, 2), 4])
    check_pages(hand.engine)


def test_a_context_that_cannot_be_copied_back_keeps_its_host_copy(hand: Bench) -> None:
    kept, victim = discarded(hand, 1), discarded(hand, 1)
    expected = drawn(hand, kept, [3])
    kept.release()
    big = hand.engine.context(priority=1)
    hand.compute(big, numbers(16 * 7, 2))
    assert victim._table.is_preempted
    big.release()
    hand.device.broken = lambda edit: isinstance(edit, Import)
    execution, _ = greedy(victim, [3])
    hand.until(execution)
    with pytest.raises(hw.PassFailed, match="import"):
        execution.result(0)
    hand.device.broken = lambda edit: False
    assert drawn(hand, victim, [3]) == expected
    check_pages(hand.engine)


def test_a_pass_that_was_not_in_the_step_is_not_hurt_by_its_edits(hand: Bench) -> None:
    idle, running = hand.engine.context(), hand.engine.context()
    hand.compute(idle, numbers(20, 1))
    hand.compute(running, numbers(20, 2))
    idle.truncate(2)  # its last page is zeroed after the cut
    hand.device.broken = lambda edit: isinstance(edit, Clear) and edit.page in idle._table.held()
    assert drawn(hand, running, [1]) == plain([*numbers(20, 2), 1])
    assert idle._table.is_preempted
    assert drawn(hand, idle, [9]) == plain([*numbers(20, 1)[:18], 9])
    check_pages(hand.engine)


def test_the_engine_lives_on_when_every_edit_fails(hand: Bench) -> None:
    hand.device.broken = lambda edit: True
    contexts = [hand.engine.context() for _ in range(3)]
    running = [greedy(c, numbers(5, n))[0] for n, c in enumerate(contexts)]
    hand.until(*running)
    for execution in running:
        with pytest.raises(hw.PassFailed, match="preparing pages"):
            execution.result(0)
    hand.device.broken = lambda edit: False
    assert [drawn(hand, c, [n]) for n, c in enumerate(contexts)] == [plain([n]) for n in range(3)]
    check_pages(hand.engine)


# -- telling edits apart -----------------------------------------------------------------------------------------------


def test_a_run_ends_before_a_page_is_written_that_it_reads() -> None:
    host = HostPages((0, 1))
    edits: list[Edit] = [Clear(1), Copy(1, 2, 4), Clear(3), Clear(1), Export((3, 4), host), Import(host, (0,), (4,))]
    assert list(runs(edits)) == [tuple(edits[:3]), tuple(edits[3:5]), tuple(edits[5:])]
    gathered: list[Edit] = [Clear(5), Gather((1, 2), (0, 3), 5, 0), Clear(1), Gather((3,), (1,), 1, 0), Clear(5)]
    assert list(runs(gathered)) == [tuple(gathered[:2]), tuple(gathered[2:])]
    assert list(runs([])) == []


def test_an_edit_is_never_done_again_on_pages_that_were_written_since() -> None:
    """Page 1 is copied out, then given away and cleared: the clear fails once, and the copy must stay what it was."""
    pages, host, tries = {1: "old"}, HostPages((0,)), []

    def do(run: tuple[Edit, ...]) -> None:
        for edit in run:
            if isinstance(edit, Export):
                edit.target.data = [pages[p] for p in edit.pages]
            elif isinstance(edit, Clear):
                pages[edit.page] = "half cleared" if not tries else ""
                if not tries:
                    tries.append(edit)
                    raise RuntimeError("once")

    assert not carry_out([Export((1,), host), Clear(1)], do)
    assert (host.data, pages) == (["old"], {1: ""})


def test_what_is_copied_from_a_spoilt_page_is_spoilt_and_a_clean_page_is_clean() -> None:
    def do(run: tuple[Edit, ...]) -> None:
        if any(isinstance(e, Clear) and e.page == 1 and e.start for e in run):
            raise RuntimeError("broken")

    damage = carry_out([Clear(1, 3), Copy(1, 2, 4), Copy(2, 3, 4), Clear(4), Clear(2)], do)
    assert sorted(damage.pages) == [1, 3]
    assert all("(clear): broken" in str(e) for e in damage.pages.values())
