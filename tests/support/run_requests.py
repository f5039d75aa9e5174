"""Random requests to a run, for tests that compare an engine with `RunState`."""

from __future__ import annotations

from hypothesis import strategies as st

from aiohooks.stores._protocol import MAX_STEP, Fail, Join, Lead, Leave, Member, Position, Write

STEPS = st.sampled_from([0, 1, 2, 3, 10, MAX_STEP - 1, MAX_STEP])
TEXTS = st.text(max_size=8) | st.sampled_from(["chief", "ünï\n", 'with "quotes" \\ and 12 34'])
IDS = st.sampled_from(["a:1:x/1", "a:1:x/2", "b:2:y/1"])
TERMS = st.integers(0, 3)
EXIT_WRITERS = st.sampled_from(["a:1:x/", "b:2:y/"])
NAMES = TEXTS.map(lambda text: text or "worker")

WRITES = st.builds(
    Write,
    st.sampled_from(["advance", "raise", "reset"]),
    STEPS,
    st.builds(Position, st.integers(1, 3), STEPS),
    TERMS,
    st.sampled_from(["a:1:x", "b:2:y", "c 3 z"]),
    st.integers(1, 5),
)
MEMBERS = st.builds(Member, IDS, NAMES, st.sampled_from([10.0, 60.5]), STEPS, TERMS, st.booleans(), st.just(0))
REQUESTS = st.one_of(
    WRITES,
    st.builds(Join, MEMBERS),
    st.builds(Leave, IDS, st.just("") | NAMES, STEPS, TEXTS, EXIT_WRITERS, st.integers(0, 3)),
    st.builds(Lead, MEMBERS.map(lambda member: member._replace(term=0, ready=False))),
    st.builds(Fail, TEXTS, EXIT_WRITERS, st.integers(0, 3)),
)
