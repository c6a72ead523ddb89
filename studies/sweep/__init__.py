"""Many training runs as one experiment: a runner that trains each once, and sweeps over flags,
files and seeds."""
