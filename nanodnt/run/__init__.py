"""What a run needs around its loop: device, processes, compilation, stopping, and the files of the
run directory."""
