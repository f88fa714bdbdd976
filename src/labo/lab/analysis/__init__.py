"""From the records of runs to small JSON documents, and the comparison of runs.

``views``, ``selective``, ``significance`` and ``labels`` have pure functions on numpy arrays; the
measures of calibration are those of :mod:`labo.calibration`. ``reading`` reads run directories.
``task`` is the protocol of what a task adds. ``groups`` compares runs, and ``run`` makes the
documents. torch is imported where something is computed with it, not before.
"""
