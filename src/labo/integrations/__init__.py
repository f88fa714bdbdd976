"""labo inside other people's training loops; each module needs its library, the package none."""
