import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorrt_llm._conflict import refuse_beside_nvidia

ROOT = Path(__file__).parents[2]


def install_metadata(directory: Path, name: str) -> Path:
    """What pip leaves behind for a distribution of this name."""
    metadata = directory / name
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: 1.2.0\n"
    )
    return metadata


@pytest.mark.parametrize(
    "name",
    [
        "tensorrt_llm-1.2.0.dist-info",
        "tensorrt-llm-1.2.0.dist-info",
        "tensorrt_llm-1.2.0-py3.12.egg-info",
    ],
)
def test_nvidias_distribution_is_refused_by_name(tmp_path, name):
    metadata = install_metadata(tmp_path, name)
    with pytest.raises(ImportError) as error:
        refuse_beside_nvidia([str(tmp_path)])
    assert str(metadata) in str(error.value)
    assert "pip uninstall tensorrt-llm" in str(error.value)


@pytest.mark.parametrize(
    "name", ["tensorrt_llm_glm-0.1.0.dist-info", "tensorrt-10.9.dist-info", "tensorrt_llm-data"]
)
def test_other_names_are_none_of_its_business(tmp_path, name):
    install_metadata(tmp_path, name)
    refuse_beside_nvidia([str(tmp_path), str(tmp_path / "missing"), __file__])


def test_the_import_itself_is_refused(tmp_path):
    install_metadata(tmp_path, "tensorrt_llm-1.2.0.dist-info")
    result = _python("import tensorrt_llm", tmp_path, ROOT)
    assert result.returncode == 1
    assert "ImportError: NVIDIA's TensorRT-LLM is installed here" in result.stderr


def test_installing_is_refused(tmp_path):
    install_metadata(tmp_path, "tensorrt_llm-1.2.0.dist-info")
    run_setup = (
        "import runpy, sys; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')"
    )
    result = _python(run_setup, tmp_path)
    assert result.returncode == 1
    assert "NVIDIA's TensorRT-LLM is installed here" in result.stderr


def test_the_check_is_cheap():
    def seconds() -> float:
        start = time.perf_counter()
        refuse_beside_nvidia()
        return time.perf_counter() - start

    assert min(seconds() for _ in range(10)) < 0.002


def _python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` from the repository's root with `paths` in front of sys.path."""
    insert = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}; "
    command = [sys.executable, "-c", insert + code]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
