"""The engine server: Arrow Flight over a unix socket, one process per executor, one resident engine.

It knows nothing of Spark beyond two process ids that bound its life. Importing this package loads nothing heavy;
``python -m pipemax.serve`` detaches itself from the process that started it before it loads anything.
"""
