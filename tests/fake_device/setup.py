"""Compiles the fake device: ``python setup.py build_ext --build-lib FOLDER --build-temp FOLDER``."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = Path(__file__).resolve().parent

setup(
    name="fake_device",
    ext_modules=[
        CppExtension(
            "fake_device",
            [str(source) for source in sorted(HERE.glob("*.cpp"))],
            include_dirs=[str(HERE.parent.parent / "csrc")],
            # -O0: compiling it takes longer than running it.
            extra_compile_args=["-O0", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
