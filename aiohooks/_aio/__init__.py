"""Features that asyncio lacks, or gets wrong on the supported Python versions; independent of hooks.

clock           the clock, which tests can replace; sleeping and waking
backoff         pauses between attempts
fork            locks, threads and connections when the process forks
observers       who is notified of what takes time
run_scope       the run that the current code is part of
await_chain     where a task is suspended
long_waits      logs what a long wait is for
cancel_watch    which of the cancels that reach a coroutine come from outside
cancel          cancel scopes, time limits, cleanup that must finish, worker threads
opening         waits for other sessions, which a stop of the one that is opening ends
gather          the lazy gather: coroutines overlap once one of them suspends
"""
