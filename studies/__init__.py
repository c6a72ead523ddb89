"""What is found out with the core: figures, sweeps, the claims of the papers and their records."""
