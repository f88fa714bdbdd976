"""``python -m labo`` is the command ``labo``."""

from .cli import main

main()
