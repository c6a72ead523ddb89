"""The surroundings of a training loop: device, processes, compilation, stopping, and the files of
the run directory."""
