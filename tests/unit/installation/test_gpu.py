"""How Horovod is built for GPUs, on machines made of stubs: drivers, compilers and libraries of every kind."""

import importlib.util
import mmap
import os
from pathlib import Path

import pytest

from hvdtrain.config.errors import SetupError
from hvdtrain.installation import build
from hvdtrain.installation import gpu as gpu_module
from hvdtrain.installation.build import wheel_key
from hvdtrain.installation.gpu import CUSOLVER, SEARCHED, Gpu, choose_gpu, driver_cuda, link_cusolver
from hvdtrain.installation.mpi import Mpi

SMI = """\
case "$*" in
-L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)" ;;
*compute_cap*) printf '9.0\\n9.0\\n' ;;
*) echo "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: {cuda}     |" ;;
esac"""


@pytest.fixture
def gpus(machine, monkeypatch):
    """A machine with a driver, TensorFlow's NCCL and a compiler."""
    monkeypatch.setattr(gpu_module, "_toolkits", toolkits_but_the_machine_s_own)
    has_driver(machine, "12.4")
    has_nccl(machine)
    has_compiler(machine, "12.6")
    return machine


REAL_TOOLKITS = gpu_module._toolkits


def toolkits_but_the_machine_s_own(environ):
    return (folder for folder in REAL_TOOLKITS(environ) if folder != Path("/usr/local/cuda"))


def has_driver(machine, cuda):
    machine.has("nvidia-smi", SMI.format(cuda=cuda))


def has_nccl(machine):
    machine.installs("nvidia_nccl_cu12", "2.32.3")
    folder = machine.packages / "nvidia" / "nccl"
    for name in ("include/nccl.h", "lib/libnccl.so.2"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("#define NCCL_MAJOR 2\n")


def has_compiler(machine, version, where="toolkit"):
    folder = machine.folder / where / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    machine.has("nvcc", f"echo Cuda compilation tools, release {version}, V{version}.85", folder)
    (folder.parent / "include").mkdir(exist_ok=True)
    (folder.parent / "include/cuda_runtime.h").touch()
    machine.set(CUDA_HOME=str(folder.parent))
    return folder.parent


def has_cusolver(machine):
    for name, files in {"cusolver": ["libcusolver.so.11"], "cusparse": ["libcusparse.so.12"]}.items():
        machine.installs(f"nvidia_{name}_cu12", "11.7")
        folder = machine.packages / "nvidia" / name / "lib"
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).touch()
    return machine.packages / "nvidia/cusparse/lib/libcusolver.so.11"


def test_tensorflow_does_not_search_where_pypi_has_cusolver():
    """Where this fails, `link_cusolver` has become unnecessary."""
    library = Path(importlib.util.find_spec("tensorflow").origin).with_name("libtensorflow_framework.so.2")
    with library.open() as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(f"/../{SEARCHED}".encode()) > 0
        assert content.find(f"/../{CUSOLVER.parent}".encode()) < 0


def test_cusolver_is_linked_where_tensorflow_searches(machine):
    link = has_cusolver(machine)
    for _ in range(2):
        link_cusolver(machine.environment)
        assert os.readlink(link) == "../../cusolver/lib/libcusolver.so.11"
    link.unlink()
    link.symlink_to("gone")  # as after a move of the environment
    link_cusolver(machine.environment)
    assert link.exists()


def test_a_folder_that_takes_no_link_is_told(machine, monkeypatch, capsys):
    link = has_cusolver(machine)
    monkeypatch.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    link_cusolver(machine.environment)
    assert f"LD_LIBRARY_PATH={machine.packages}/nvidia/cusolver/lib" in capsys.readouterr().out
    assert not link.exists()


def test_without_cuda_s_packages_nothing_is_linked(machine):
    link_cusolver(machine.environment)
    assert not (machine.packages / "nvidia").exists()


def choose(machine, choice="auto"):
    return choose_gpu(choice, machine.environment, os.environ)


def test_a_driver_and_the_libraries_bring_nccl(gpus):
    found = choose(gpus)
    assert (found.kind, found.compiler, found.capabilities) == ("nccl", gpus.folder / "toolkit", ("90",))
    assert found.nccl == gpus.packages / "nvidia/nccl"
    assert found.identity.endswith("-cuda12.6-90")


@pytest.mark.parametrize("lacks", ["driver", "devices", "libraries"])
def test_auto_builds_for_cpus_where_anything_is_missing(gpus, lacks):
    if lacks == "driver":
        gpus.lacks("nvidia-smi")
    elif lacks == "devices":
        gpus.has("nvidia-smi", "echo No devices were found; exit 6")
    else:
        (gpus.packages / "nvidia/nccl/include/nccl.h").unlink()
    assert choose(gpus) == Gpu("none")


def test_a_login_node_builds_for_all_gpus(gpus):
    gpus.lacks("nvidia-smi")
    assert driver_cuda(os.environ) is None
    found = choose(gpus, "nccl")
    assert (found.kind, found.capabilities) == ("nccl", ())
    assert found.identity.endswith("-all")
    gpus.set(HOROVOD_BUILD_CUDA_CC_LIST="80,90")
    assert choose(gpus, "nccl").capabilities == ("80", "90")


def test_without_the_libraries_the_command_that_installs_them_is_named(gpus):
    (gpus.packages / "nvidia/nccl/include/nccl.h").unlink()
    with pytest.raises(SetupError, match=r"no nvidia-nccl-cu12. Run: pip install 'tensorflow\[and-cuda\]~=2.21.0'"):
        choose(gpus, "nccl")


def test_a_script_on_path_that_runs_another_compiler_is_no_toolkit(gpus, monkeypatch):
    has_driver(gpus, "13.0")
    monkeypatch.delenv("CUDA_HOME")
    gpus.has("nvcc", f'exec {gpus.folder}/toolkit/bin/nvcc "$@"')
    assert choose(gpus).compiler is None


@pytest.mark.parametrize("version", ["10.2", "nonsense"])
def test_a_compiler_that_is_too_old_is_passed_over(gpus, version):
    has_driver(gpus, "13.0")
    has_compiler(gpus, version)
    assert choose(gpus).compiler is None


def test_a_compiler_newer_than_the_driver_is_refused(gpus):
    has_compiler(gpus, "13.0")
    with pytest.raises(
        SetupError, match=r"here CUDA 12 or older. Received: CUDA 13 \(.*toolkit\).*module load cuda/12"
    ):
        choose(gpus)


def test_so_is_pypi_s_where_the_driver_is_older(gpus):
    gpus.set(CUDA_HOME=str(gpus.folder / "nowhere"))
    with pytest.raises(SetupError, match=r"Received: CUDA 13 \(only the compiler that PyPI has\)"):
        choose(gpus)
    has_driver(gpus, "13.0")
    assert choose(gpus).compiler is None


def test_a_build_with_nccl_is_told_what_it_takes(gpus):
    calls = gpus.setup()
    environ = eval((gpus.packages / "build-environment").read_text())
    assert environ["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert environ["HOROVOD_CUDA_HOME"] == str(gpus.folder / "toolkit")
    assert environ["PATH"].startswith(str(gpus.folder / "toolkit/bin"))
    assert environ["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
    assert "$ORIGIN/../../nvidia/nccl/lib" in environ["LDFLAGS"]
    assert not any("nvidia-cuda-nvcc" in call for call in calls)
    assert gpus.setup() == []


def test_pypi_s_compiler_is_laid_out_as_a_toolkit(tmp_path):
    class Pip:
        def install_into(self, folder, requirements, *, what):
            for name in ("bin/nvcc", "lib/libcudart.so.13", "lib/libcudart_static.a", "include/cuda_runtime.h"):
                (folder / "nvidia/cu13" / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / "nvidia/cu13" / name).touch()

    toolkit = build.from_pypi(tmp_path / "cuda", Pip())
    assert toolkit == tmp_path / "cuda/nvidia/cu13"
    assert (toolkit / "lib64/libcudart.so").resolve() == toolkit / "lib/libcudart.so.13"


def test_other_gpus_need_another_build(gpus):
    def key():
        return wheel_key(gpus.environment, Mpi("none", "nompi"), choose(gpus), os.environ)

    first = key()
    gpus.has("nvidia-smi", SMI.format(cuda="12.4").replace("9.0", "8.0"))
    second = key()
    gpus.lacks("nvidia-smi")
    assert len({first, second, key()}) == 3
