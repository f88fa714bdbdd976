"""Time and memory of labo and its alternatives: ``python -m benchmarks`` or ``make bench``."""
