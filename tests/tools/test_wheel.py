"""A wheel for others: made as `make wheel` makes it, found by pip on its page, and used where no compiler is."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

import fastsync
from tests.tools.source_tree import ROOT, copy_tree, run
from tools import wheel_index

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


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
    tree, wheels, pages = tmp_path / "tree", tmp_path / "wheels", tmp_path / "pages"
    tree.mkdir()
    copy_tree(tree)
    make = ("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels), ".")
    run(tree, *PIP, *make, FASTSYNC_WHEEL="1")
    shutil.rmtree(tree)
    (folder,) = wheel_index.write_pages(list(wheels.glob("*.whl")), pages, f"{wheels.as_uri()}/")
    version = f"{fastsync.__version__}+{folder.name}"
    assert folder.name.startswith(f"torch{torch.__version__.split('+')[0]}.")
    # Without dependencies, because the network is not asked for torch. pip sees the editable fastsync beside torch.
    options = ("--no-deps", "--ignore-installed", "--no-cache-dir", "--index-url", folder.as_uri())
    run(tmp_path, *PIP, "--python", str(environment), "install", *options, f"fastsync-torch=={version}")

    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (script,) = (block for block in blocks if "process_group" in block)
    (tmp_path / "train.py").write_text(script)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    alone = {"PATH": str(environment / "bin"), "PYTHONPATH": "", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    python = str(environment / "bin/python")
    assert run(tmp_path, python, "-c", "import fastsync; print(fastsync.__file__)", **alone).startswith(
        f"{environment}/"
    )
    said = run(tmp_path, python, *torchrun, str(tmp_path / "train.py"), **alone)
    assert re.search(r"^loss 0\.\d+, [1-9]\d* bytes sent$", said, re.M), said

    needs = run(tmp_path, *PIP, "--python", str(environment), "show", "--verbose", "fastsync-torch")
    assert f"Version: {version}\n" in needs
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
