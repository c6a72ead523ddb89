"""Summary of a configuration before anything is trained: equations, counts, memory, learning rates,
a plan."""
