"""Why something waits: the wait-for graph of tasks, calls, locks, queues, steps and threads, with
the lines of the user's code.

graph     WaitGraph: plain data, as text and as JSON, with its deadlocks
frames    what the frames of tasks and threads have
builder   makes the graph of event loops, of a task, or of something that is waited for
"""
