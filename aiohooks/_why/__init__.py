"""Why something waits: the wait-for graph of tasks, locks, queues, steps and threads.

graph        WaitGraph: plain data, as text and as JSON, with its deadlocks
builder      makes the graph of event loops, of a task, or of another object
primitives   what the functions of asyncio, anyio and threading wait for
futures      what sets a future
frames       the locks that a suspended task holds
tasks        the chain of awaits of a task
processes    the state of another process
blocked_loop what blocks the event loop
"""
