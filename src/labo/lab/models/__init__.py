"""The networks of the experiments, one file per task."""
