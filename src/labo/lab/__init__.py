"""The lab: everything that runs experiments. It imports the core, never the other way round."""
