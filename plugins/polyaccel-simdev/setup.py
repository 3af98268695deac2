"""The C++ half, built against the installed torch. Everything else stands in pyproject.toml."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    ext_modules=[
        CppExtension(
            "polyaccel_simdev._device", ["csrc/unity.cpp"], extra_compile_args=["-O1", "-g0", "-std=c++20", "-w"]
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
)
