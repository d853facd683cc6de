"""``python -m pipemax.replicas DESCRIPTOR``: the process of one replica; see ``pipemax.replicas.child``."""

from pipemax.replicas.child import main

if __name__ == "__main__":
    main()
