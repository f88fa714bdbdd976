"""Adapters for other training frameworks. Each one needs its library, this package needs none."""
