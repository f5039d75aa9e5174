"""Why something waits: the wait-for graph of tasks, locks, queues, steps and threads.

graph        WaitGraph: plain data, as text and as JSON, with its deadlocks
builder      makes the graph of event loops, of a task, or of another object
sources      the end of a chain of awaits: groups, futures, functions, and the holders of locks
tasks        the chain of awaits of a task, and the stack of a thread
processes    the state of another process
blocked_loop what blocks the event loop
"""
