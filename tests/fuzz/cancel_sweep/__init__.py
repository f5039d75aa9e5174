"""The cancel sweep: sessions and all that belongs to them, cancelled at every suspension.

`probe` counts suspensions and cancels, `wrappers` are the places in which a user may call the library, `runner` runs points and
checks them, `sweep` chooses the points. `fixture` is what a scenario runs with, `scenarios` has the scenarios by subject, and
`injected_bugs` shows that each kind of violation is found.
"""
