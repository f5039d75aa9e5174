"""The wait-for graph as data: its text and its deadlocks."""

from __future__ import annotations

from aiohooks.session import WaitEdge, WaitGraph, WaitNode


def graph(*edges: str, unsure: tuple[str, ...] = ()) -> WaitGraph:
    """Return the graph with edges like `a-b`."""
    names = dict.fromkeys(name for edge in (*edges, *unsure) for name in edge.split("-"))
    nodes = tuple(
        WaitNode(name, "task", name, function="f", where=f"/x/{name}.py:1") for name in names
    )
    pairs = ((edge, *edge.split("-")) for edge in (*edges, *unsure))
    made = [
        WaitEdge(waiter, awaited, "all" if edge in edges else "perhaps")
        for edge, waiter, awaited in pairs
    ]
    return WaitGraph(nodes, tuple(made))


def names(chain: tuple[WaitNode, ...]) -> str:
    """Return a chain as text."""
    return "".join(node.name for node in chain)


def test_a_chain_for_each_path_that_ends() -> None:
    """Chains begin where nothing waits; what several wait for is followed once."""
    assert [*map(names, graph("a-b", "b-c", "b-d", "e-b").chains())] == ["abc", "abd", "eb"]


def test_deadlocks_are_cycles_of_what_is_needed() -> None:
    """Each cycle is found once, also behind others; one with an edge that is not needed is none."""
    found = graph("a-b", "b-c", "c-b", "d-d", "c-e", "e-f", "f-e", "g-h", unsure=("h-g",)).deadlocks
    assert sorted("".join(sorted(names(cycle))) for cycle in found) == ["bc", "d", "ef"]


def test_text() -> None:
    """The deadlocks come first, and chains end where they reach one."""
    node = WaitNode("a", "hook", "A.after_run", "stuck", "A.after_run", "/x/y.py:3", 2.5)
    assert str(node) == "A.after_run (stuck), /x/y.py:3, 2.5 s"
    second = WaitNode("b", "hook", "A#2.after_run at step 1", "", "A.after_run", "/x/y.py:3")
    assert str(second) == "A#2.after_run at step 1, /x/y.py:3"
    assert (
        str(WaitNode("a", "session", "session 'a'", function="sess", where="/x/y.py:3"))
        == "session 'a', sess at /x/y.py:3"
    )
    assert str(graph("a-b", "b-c", "c-b")).splitlines() == [
        "deadlock: b, f at /x/b.py:1",
        "    <- c, f at /x/c.py:1",
        "    <- b",
        "a, f at /x/a.py:1",
        "    waits for b, in the deadlock",
    ]
    assert (
        str(graph("a-b", unsure=("b-c",)))
        == "a, f at /x/a.py:1\n    waits for b, f at /x/b.py:1\n    <- perhaps c, f at /x/c.py:1"
    )
    assert str(WaitGraph((), ())) == "nothing waits"
    assert str(graph(*(f"a{number}-b{number}" for number in range(99)))).count("waits for") == 30
