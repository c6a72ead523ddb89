"""The machinery: everything of a training run that is not the network."""
