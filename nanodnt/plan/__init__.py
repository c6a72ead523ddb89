"""What a configuration comes to before anything is trained: equations, counts, memory, learning
rates, a plan."""
