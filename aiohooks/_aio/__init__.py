"""Features that asyncio lacks, or gets wrong on the supported Python versions; independent of hooks.

clock           the clock, which tests can replace; sleeping and waking
backoff         pauses between attempts
fork            locks, threads and connections when the process forks
observers       who is notified of what takes time; a coroutine that is resumed by hand
run_scope       the run that the current code is part of
long_waits      logs what a long wait is for
cancel          cleanup that must finish, worker threads
contexts        contexts of calls, and what these have set in them
opening         waits for other sessions, which a stop of the one that is opening ends
thread_queue    a bounded queue that is worked off in a thread
overlap         calls and waits that may have to be ended, each in a task of its own; time limits
"""
