"""Why something waits: the wait-for graph of tasks, locks, queues, steps and threads.

A task is suspended in a chain of awaits: its coroutine awaits another one, and so on. Each of these
is a link of the chain, with its frame, and the last link may be a future, which another task, a
thread or a callback sets. The registry of activity (`_core.activity`) has an entry for each wait of
the library itself.

graph        WaitGraph: plain data, as text and as JSON, with its deadlocks
builder      makes the graph of event loops, of a task, or of another object
sources      the end of a chain of awaits: groups, futures, functions, the holders of locks, and the
             state of another process
tasks        the chain of awaits of a task, the stack of a thread, and what blocks the event loop
"""
