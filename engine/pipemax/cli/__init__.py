"""The commands of ``pipemax``, a module each. What they call is imported when they run: ``--help`` answers at once."""
