"""The script of the Redis store: changes of a state, lost keys, forgotten writers;
`simulation.equality` has its answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from aiohooks.stores._protocol import Join, Member, Position, Write
from aiohooks.stores.engine import RunState
from aiohooks.stores.redis import parse_answer, run_keys, write_argument
from tests.fuzz.simulation.equality import ServerScript
from tests.support.redis_servers import KINDS
from tests.support.store_servers import running

FIRST = Write("advance", 5, Position(1, 0), 0, "w", 1)


@pytest.fixture(scope="module", params=KINDS)
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[redis.Redis]:
    with (
        running(request.param, tmp_path_factory.mktemp("script"), keeps=False) as server,
        # As the store encodes: text that is not UTF-8 reaches the server as well.
        redis.Redis(
            port=server.port, decode_responses=True, encoding_errors="backslashreplace"
        ) as client,
    ):
        yield client


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_a_run_that_has_lost_a_key_is_lost(client: redis.Redis, lost: int) -> None:
    """If a key was evicted, no write and no change is accepted until the run was made anew; a
    write to the lost run is refused then.
    """
    scripted = ServerScript(client)
    scripted.apply(FIRST)
    scripted.apply(Join(Member("p/1", "one", 10.0)))
    before = scripted.read()
    client.delete(scripted.keys[lost])
    found = scripted.read()
    assert found.run_id == ""
    second = FIRST._replace(seq=2)
    assert scripted.apply(second).status == "lost"
    assert not scripted.swap(before, before.state)
    state = RunState()
    state.follow(before.state.snapshot())
    assert scripted.swap(found, state, "another")
    again = scripted.read()
    assert (again.run_id, again.state.position, again.version) == ("another", Position(2, 5), 1)
    assert list(again.state.members) == ["p/1"]
    assert scripted.apply(second).status == "lost"
    after = parse_answer(scripted.call("write", write_argument(FIRST), run_id="another"))
    assert (after.status, after.position) == ("ok", Position(2, 10))


def test_the_stream_of_the_changes_is_not_missed(client: redis.Redis) -> None:
    """Its entries are numbered by the state."""
    scripted = ServerScript(client)
    scripted.apply(FIRST)
    client.delete(scripted.keys.changes)
    assert scripted.read().run_id == "id"


def test_the_longest_silent_writers_are_forgotten_first(client: redis.Redis) -> None:
    """At least 1,024 writers are remembered: a repeated write of one of them is not applied
    again.
    """
    scripted = ServerScript(client)
    for number in range(1, 1_400):
        scripted.apply(Write("advance", 1, Position(1, 0), 0, f"w{number}", 1))
    remembered = client.hlen(scripted.keys.answers)
    assert 1_024 <= remembered <= 1_280
    assert scripted.apply(Write("advance", 1, Position(1, 0), 0, "w1399", 1)).position == Position(
        1, 1_399
    )
    assert scripted.apply(Write("advance", 1, Position(1, 0), 0, "w500", 1)).position == Position(
        1, 500
    )
    assert scripted.read().state.position == Position(1, 1_399)


def test_a_long_field_is_refused_by_its_length(client: redis.Redis) -> None:
    """What others have written is shown in a few characters, and nothing is changed."""
    scripted = ServerScript(client)
    scripted.apply(Write("advance", 1, Position(1, 0), 0, "w", 1))
    found = scripted.read()
    junk: Any = {"run": "id", "more": "x" * 1_000_000}
    client.xadd(scripted.keys.positions, junk, id="1-500", maxlen=1, approximate=False)
    before = [client.dump(key) for key in scripted.keys]
    write = Write("advance", 1, Position(1, 0), 0, "w", 2)
    for call in (lambda: scripted.apply(write), lambda: scripted.swap(found, found.state, "b")):
        with pytest.raises(redis.ResponseError, match="FOREIGN an entry of the stream") as caught:
            call()
        assert len(str(caught.value)) < 500
    assert [client.dump(key) for key in scripted.keys] == before


def test_answers_that_no_store_has_written(client: redis.Redis) -> None:
    """A write is not answered with a step that the run has never reached, and too many answers are
    not read.
    """
    scripted = ServerScript(client)
    write = Write("advance", 1, Position(1, 0), 0, "w", 1)
    scripted.apply(write)
    for answer in ("1 1 2", "1 2 0", "9" * 400 + " 1 1", "-1 1 1"):
        client.hset(scripted.keys.answers, "w w", answer)
        with pytest.raises(redis.ResponseError, match="FOREIGN"):
            scripted.apply(write)
    client.hset(scripted.keys.answers, mapping={f"x{number}": "" for number in range(6_000)})
    with pytest.raises(redis.ResponseError, match="FOREIGN the number of the answers is 6003"):
        scripted.apply(write._replace(writer="another"))


def test_all_keys_of_a_run_are_on_one_node() -> None:
    """The part in braces is the same in all keys, also where the name of the run has braces."""
    for run in ("default", "a}b", "{", "}{x}", "100%"):
        keys = run_keys(run, "host:1:ab")
        tags = {key[key.index("{") + 1 : key.index("}")] for key in keys}
        assert len(tags) == 1
        assert all(tags)
    assert run_keys("a}", "").positions != run_keys("a%7D", "").positions
