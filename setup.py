"""The metadata is in pyproject.toml; this file only refuses to install beside NVIDIA's wheel.

An isolated build does not see what is installed, so `import tensorrt_llm` checks the same again.
"""

import runpy
from pathlib import Path

from setuptools import setup

conflict = runpy.run_path(str(Path(__file__).parent / "tensorrt_llm" / "_conflict.py"))
conflict["refuse_beside_nvidia"]()
setup()
