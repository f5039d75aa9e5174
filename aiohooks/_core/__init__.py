"""Features that asyncio lacks, or gets wrong on the supported Python versions; independent of
hooks.

clock           the clock, which tests can replace; sleeping and waking
fork            locks, threads and connections when the process forks
observers       who is notified of what takes time; a coroutine that is resumed by hand
cancel          cleanup that must finish, worker threads
contexts        the run that the current code is part of; contexts of calls, and what these have set
                in them
waits           waits for others, which a stop of a session that is opening ends; logs of long
                waits; pauses between attempts
thread_queue    a bounded queue that is worked off in a thread
diagnostics     where tasks are suspended, and what blocks the event loop
validate        checks of arguments
lazy            packages that import a public name when it is first used
overlap         calls and waits that may have to be ended, each in a task of its own; time limits
"""
