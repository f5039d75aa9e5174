"""Features that asyncio lacks, or gets wrong on the supported Python versions.

None of them knows of hooks.

    calls          calls and waits that end together, each in a task and a context of its own;
                   whether a call may wait, and results without a task
    queue          bounded queues, whose items are worked off in order, by tasks or by a thread
    waits          waits for tasks, for others, for the next event, and for a number that grows;
                   cleanup that must finish, worker threads, new tasks; pauses
    activity       the registry of activities and waits of tasks, for reports, and their observers;
                   the run that the current code is part of; the logger and reports of long waits
    clock          the clock, which tests can replace; timers and pauses
    validate       checks of arguments
    files          writing to files
    fork           locks, threads and connections when the process forks
    lazy           packages that import a public name when it is first used
"""
