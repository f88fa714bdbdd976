"""A run on disk: its directory, checkpoints, files, seeds, processes and progress."""
