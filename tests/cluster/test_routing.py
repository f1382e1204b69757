"""The routing rule: conversations stay together, load spreads, sessions and homes stick; a simulation at some size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.cluster.routing import (
    MAX_SUMMARY,
    RECENT_SECONDS,
    CacheSummary,
    RouteRequest,
    RoutingTable,
    load_pages,
    others_leases,
    rendezvous,
)
from headway.cluster.simulation import SimulationSettings, simulate

PROMPT = tuple(range(1000, 1040))


def table(*names: str) -> RoutingTable:
    made = RoutingTable()
    made.set_replicas(names)
    return made


def test_a_request_goes_to_the_replica_with_the_longest_prefix():
    routes = table("a", "b", "c")
    routes.refresh("a", CacheSummary.of(PROMPT[:10]), 0)
    routes.refresh("b", CacheSummary.of(PROMPT[:30]), 0)
    ranked = routes.rank(RouteRequest(PROMPT), {"a": 0, "b": 0, "c": 0})
    assert [(one.replica, one.pages) for one in ranked] == [("b", 30), ("a", 10)]  # and nobody is less busy than a


def test_a_busy_replica_gives_way_when_computing_again_is_cheaper():
    routes = table("a", "b")
    routes.refresh("a", CacheSummary.of(PROMPT), 0)
    enough = next(more for more in range(100) if load_pages(more) > len(PROMPT))
    for least in (0, 7):
        assert routes.rank(RouteRequest(PROMPT), {"a": least + enough - 1, "b": least})[0].replica == "a"
        assert routes.rank(RouteRequest(PROMPT), {"a": least + enough, "b": least})[0].replica == "b"


def test_a_front_counts_its_own_leases_itself_whatever_a_replica_told_earlier():
    assert others_leases({"this": 3, "that": 2}, "this") == 2  # its three may have ended since
    assert others_leases({}, "this") == 0


def test_what_was_just_sent_counts_until_a_summary_should_have_it():
    routes = table("a", "b")
    routes.sent("b", PROMPT, 0)
    loads = {"a": 0, "b": 0}
    assert routes.rank(RouteRequest((*PROMPT, 1, 2)), loads)[0].replica == "b"
    routes.refresh("b", CacheSummary.of([7]), 1)  # made before the prompt was computed
    assert routes.rank(RouteRequest(PROMPT), loads)[0].pages == len(PROMPT)
    routes.refresh("b", CacheSummary.of([8]), RECENT_SECONDS + 1)  # the pages were evicted
    assert routes.rank(RouteRequest(PROMPT), loads)[0].pages == 0


def test_prompts_that_nobody_has_go_around():
    routes, seen = table("a", "b", "c"), []
    for i in range(6):
        name = routes.rank(RouteRequest((i,)), dict.fromkeys("abc", 0))[0].replica
        routes.sent(name, (i,), 0)
        seen.append(name)
    assert sorted(seen) == ["a", "a", "b", "b", "c", "c"]


def test_an_owner_is_the_only_choice_while_it_exists():
    routes, loads = table("a", "b"), {"a": 9, "b": 0}
    assert [one.replica for one in routes.rank(RouteRequest(PROMPT, replica="a"), loads)] == ["a"]
    routes.set_replicas(["b"])
    assert [one.replica for one in routes.rank(RouteRequest(replica="a"), {"b": 0})] == ["b"]


def test_a_replica_that_failed_a_request_is_avoided():
    routes = table("a", "b")
    routes.refresh("a", CacheSummary.of(PROMPT), 0)
    request = RouteRequest(PROMPT, avoid=frozenset({"a"}))
    assert [one.replica for one in routes.rank(request, {"a": 0, "b": 5})] == ["b"]
    assert routes.rank(RouteRequest(avoid=frozenset("ab")), {"a": 0, "b": 0}) == []


def test_few_homes_move_when_a_replica_goes():
    names, tenants = [f"r{i}" for i in range(10)], [f"key{i}" for i in range(500)]
    before = {name: rendezvous(name, names)[0] for name in tenants}
    after = {name: rendezvous(name, names[1:])[0] for name in tenants}
    moved = [name for name in tenants if before[name] != after[name]]
    assert all(before[name] == "r0" for name in moved)
    assert len(moved) < 100


@given(st.sets(st.integers(0, 2**64 - 1), max_size=300), st.integers(1, 64))
def test_a_summary_is_small_and_survives_its_journey(keys: set[int], limit: int):
    summary = CacheSummary.of(keys, limit)
    assert len(summary.keys) <= limit <= MAX_SUMMARY
    assert summary.keys == {key for key in keys if key % summary.every == 0}
    assert CacheSummary.unpacked(summary.packed()) == summary


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["sent", "summary", "gone"]), st.sets(st.integers(0, 9))),
        max_size=30,
    )
)
def test_the_index_of_keys_is_what_replicas_hold(events: list[tuple[str, str, set[int]]]):
    routes = table("a", "b", "c")
    for i, (name, kind, keys) in enumerate(events):
        match kind:
            case "sent":
                routes.sent(name, sorted(keys), 10.0 * i)
            case "summary":
                routes.refresh(name, CacheSummary.of(keys), 10.0 * i)
            case _:
                routes.set_replicas({"a", "b", "c"} - {name})
                routes.set_replicas("abc")
        held = {
            key: {name for name, known in routes._known.items() if key in known.summary.keys or key in known.recent}
            for key in range(10)
        }
        assert routes._holders == {key: names for key, names in held.items() if names}


def test_the_simulation_keeps_caches_warm_and_work_even():
    settings = SimulationSettings(replicas=8, conversations=120, systems=8, refresh_seconds=10)
    warm, around = simulate(settings), simulate(settings, rule="round_robin")
    assert warm.requests == around.requests == 720
    assert warm.hit_rate > around.hit_rate + 0.15
    assert warm.busiest < 2
    assert warm.wait_mean < around.wait_mean


def test_conversations_that_begin_at_once_compute_nothing_twice():
    """Two conversations for each of four system prompts: a page is computed where it is needed first, only there."""
    settings = SimulationSettings(
        replicas=4, conversations=8, turns=4, systems=4, system_pages=8, turn_pages=3, pages_per_second=20.0,
        decode_seconds=0.5, pause_seconds=0.01, use=1e6,
    )  # fmt: skip
    result = simulate(settings)
    assert result.computed_pages == 4 * 8 + 8 * 4 * 3
    assert result.busiest == 1


def test_one_system_prompt_for_everybody_is_computed_on_every_replica():
    """The longest prefix alone would leave three of four replicas without work."""
    settings = SimulationSettings(replicas=4, conversations=64, systems=1, turns=2, use=1e6, pause_seconds=0.01)
    result = simulate(settings)
    assert result.busiest < 1.1
