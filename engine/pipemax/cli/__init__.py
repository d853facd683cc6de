"""The commands of ``pipemax``, one module each. They import what they call only when they run: ``--help`` is fast."""
