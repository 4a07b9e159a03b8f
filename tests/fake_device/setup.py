"""Compiles the fake device: ``python setup.py build_ext --build-lib FOLDER --build-temp FOLDER``."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = Path(__file__).resolve().parent
# All files at once, for most of a file's time goes into torch's headers.
UNIT = Path("fake_device_unit.cpp").resolve()
text = "".join(f'#include "{source}"\n' for source in sorted(HERE.glob("*.cpp")))
if not UNIT.exists() or UNIT.read_text() != text:
    UNIT.write_text(text)

setup(
    name="fake_device",
    ext_modules=[
        CppExtension(
            "fake_device",
            [str(UNIT)],
            include_dirs=[str(HERE.parent.parent / "csrc"), str(HERE)],
            # -O0: compiling it takes longer than running it.
            extra_compile_args=["-O0", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall"],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
