"""Features that asyncio lacks, or gets wrong on the supported Python versions.

None of them knows of hooks.

    calls          calls and waits that end together, each in a task of its own; time limits
    contexts       contexts of calls, and how the variables that calls set return to their caller
    scope          the run that the current code is part of
    coroutines     whether a call may wait; results without a task
    cancel         cleanup that must finish, worker threads, new tasks
    clock          the clock, which tests can replace; timers and pauses
    waiters        futures of waits: for the next event, and for a number that grows
    waits          waits for others while a session opens; a log of waits; pauses
    queue          bounded queues, whose items are worked off in order, by tasks or by a thread
    observers      notifications of activities that take time
    reports        the logger, and how waits describe themselves in reports
    validate       checks of arguments
    fork           locks, threads and connections when the process forks
    lazy           packages that import a public name when it is first used
"""
