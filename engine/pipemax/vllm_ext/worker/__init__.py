"""The parts that run in a stage's process: workers, the connector that copies with each step, and their clock."""
