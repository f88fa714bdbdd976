"""The optional C kernel; all else is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# No PyTorch and no Python headers: the library is opened through ctypes, so that one build serves
# every version of both. `optional`: without a compiler the package installs and works without it.
native = Extension(
    "labo.fast._native",
    sources=["src/labo/fast/native.c"],
    extra_compile_args=["/O2"] if sys.platform == "win32" else ["-O3", "-g0", "-std=c11"],
    libraries=[] if sys.platform == "win32" else ["m"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[native], options={"bdist_wheel": {"py_limited_api": "cp310"}})
