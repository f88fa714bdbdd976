"""What labo costs, beside what it replaces: ``python -m benchmarks`` (or ``make bench``)."""
