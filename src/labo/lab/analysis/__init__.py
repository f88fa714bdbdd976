"""From the records of runs to small JSON: the paper's Discussion, calibration, smoothing's harms.

Pure functions on numpy arrays, one module per question; ``run`` puts them together. Nothing here
imports torch, so that a report can be made where no model can be run.
"""
