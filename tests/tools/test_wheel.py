"""A wheel for others: made as `make wheel` makes it, found by pip on its page, and used where no compiler is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from tools import wheel_index

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | variables
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An empty environment, but for the torch and the numpy of this one."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/*/site-packages")
    # Of what lies in that folder, an editable fastsync is no part: it is a .pth file, which only one's own folder has.
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
def test_a_wheel_trains_where_no_compiler_is(environment: Path, tmp_path: Path) -> None:
    wheels, pages = tmp_path / "wheels", tmp_path / "pages"
    make = ("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), ".")
    run(*PIP, *make, FASTSYNC_WHEEL="1", FASTSYNC_CUDA="0")
    wheel_index.main([str(wheels), str(pages)])
    public = torch.__version__.split("+")[0]
    address = (pages / f"torch{public}.cpu").as_uri()
    # Without dependencies, because the network is not asked for torch. pip sees the editable fastsync beside torch.
    options = ("--no-deps", "--ignore-installed", "--no-cache-dir", "--index-url", address)
    run(*PIP, "--python", str(environment), "install", *options, "fastsync-torch")

    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (script,) = (block for block in blocks if "process_group" in block)
    (tmp_path / "train.py").write_text(f"{script}\n    print(fastsync.__file__)\n")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    alone = {"PATH": str(environment / "bin"), "PYTHONPATH": "", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    said = run(str(environment / "bin/python"), *torchrun, str(tmp_path / "train.py"), **alone)
    assert re.search(r"^loss 0\.\d+, [1-9]\d* bytes sent$", said, re.M), said
    assert said.count(f"{environment}/lib/") == 2

    needs = run(*PIP, "--python", str(environment), "show", "--verbose", "fastsync-torch")
    assert f"Version: 0.1.0+torch{public}.cpu\n" in needs
    assert "Requires: numpy, torch\n" in needs


def test_each_torch_has_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two versions pip would take the higher one, whatever torch is there."""
    names = [
        f"fastsync_torch-0.1.0+{torch}-{python}-{python}-manylinux_2_28_x86_64.whl"
        for torch in ("torch2.13.0.cpu", "torch2.15.0.cu13")
        for python in ("cp310", "cp313")
    ]
    for name in names:
        (tmp_path / name).write_text(name)
    addresses = [f"https://example.org/assets/{name.replace('+', '%2B')}" for name in names]
    wheel_index.main([str(tmp_path), str(tmp_path / "pages"), "--wheels-at", "https://example.org/assets"])
    assert "--extra-index-url" in capsys.readouterr().out
    for index, torch_of_page in enumerate(("torch2.13.0.cpu", "torch2.15.0.cu13")):
        page = (tmp_path / "pages" / torch_of_page / "fastsync-torch/index.html").read_text()
        assert re.findall(r">(.*?\.whl)<", page) == names[2 * index : 2 * index + 2]
        linked = re.findall(r'href="(.*?)#sha256=[0-9a-f]{64}"', page)
        assert linked == addresses[2 * index : 2 * index + 2]


def test_a_wheel_that_names_no_torch_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "fastsync_torch-0.1.0-cp311-cp311-linux_x86_64.whl").touch()
    with pytest.raises(SystemExit, match=r"names no torch: .* FASTSYNC_WHEEL=1"):
        wheel_index.main([str(tmp_path), str(tmp_path / "pages")])
