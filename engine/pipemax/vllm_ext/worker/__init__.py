"""What runs in a stage's process: workers, the connector that copies with each step, and the clock of both."""
