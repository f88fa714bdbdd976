"""From the records of runs to small JSON documents, and the comparison of runs.

``calibration``, ``selective``, ``intervals``, ``significance``, ``labels`` and ``training`` have
pure functions on numpy arrays. ``reading`` reads run directories. ``task`` is the protocol of what
a task adds. ``groups`` compares runs, and ``run`` makes the documents. Nothing here imports torch.
"""
