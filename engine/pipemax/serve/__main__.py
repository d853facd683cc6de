"""``python -m pipemax.serve --socket PATH --watch-jvm PID:TICKS --log FILE``."""

from pipemax.serve.main import main

if __name__ == "__main__":
    main()
