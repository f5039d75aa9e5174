"""Bridges to other software, each imported by its own name.

Nothing in the library imports them.

asgi            a session in a web service: health, progress, waits for steps and a page, as a
                Starlette sub-application
opentelemetry   a session in OpenTelemetry: a span for each run and for each wait in it, and metrics
prometheus      a session in Prometheus: its state whenever it is scraped
tensorflow      a TensorFlow 1.x graph as the graph of a session, and hooks that were written for
                it, unchanged
trackers        a session's metrics in an experiment tracker: MLflow, Weights & Biases, TensorBoard
"""
