"""Why something waits: the wait-for graph of tasks, locks, queues, steps and threads.

graph        WaitGraph: plain data, as text and as JSON, with its deadlocks
builder      makes the graph of event loops, of a task, or of another object
sources      the end of a chain of awaits: groups, futures, functions, the holders of locks, and the
             state of another process
tasks        the chain of awaits of a task, the stack of a thread, and what blocks the event loop
"""
