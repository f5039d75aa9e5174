"""Why something waits: the wait-for graph of tasks, calls, locks, queues, steps and threads, with
the lines of the user's code.

graph        WaitGraph: plain data, as text and as JSON, with its deadlocks
builder      makes the graph of event loops, of a task, or of another object
primitives   what the coroutines of asyncio and anyio wait for
threads      what threads wait for
frames       the locks that a suspended task holds
tasks        the chain of awaits of a task
"""
