"""Fuzzing: damaged files for every reader, and random cases for the C kernel under sanitizers.

``make fuzz`` runs all of it; the test suite runs a small, fixed part
(``tests/project/test_fuzz.py``). A seed and a number determine every case, so that a failure can be
repeated.
"""
