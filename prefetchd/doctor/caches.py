"""The doctor's checks of the places where artifacts are found again: home, cache directories, their disks.

An engine looks for a kernel in a directory it computed itself, so what counts is where the *library* will
look, in its own words, and whether a process of ours can publish there. The subtle rule: a directory that
does not exist yet is judged by the nearest one above it that does, since the library will create it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from prefetchd.compilers.base import CompilerUnavailable
from prefetchd.compilers.deep_jit import CACHE_VARIABLE, LAYOUTS, DeepJit
from prefetchd.doctor.facts import Machine, Verdict, exists, fail, missing, ok, problem_and_fix, warn
from prefetchd.doctor.libraries import deep_gemm_directory, deep_gemm_line
from prefetchd.targets import load_target, preset_names

TRITON_VARIABLE = "TRITON_CACHE_DIR"
# A variable that only one of the two processes has makes them use different directories.
EVERYWHERE = "here and in the engine"
# A cubin is 50-400 kB and a whole model some hundreds of them; staging needs the same again.
LOW_SPACE_BYTES = 1 << 30
# An entry takes 3-8 inodes; when they run out a disk is full although it has space.
HIGH_INODE_USE = 0.9
# File systems whose renames and time stamps other machines see late, and whose every look-up is a round trip.
NETWORK_KINDS = (
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "ocfs2",
    "orangefs", "panfs", "pvfs2", "smb", "virtiofs", "wekafs",
)  # fmt: skip
# FUSE file systems that only arrange local disks; any other is taken for a remote one.
LOCAL_FUSE_KINDS = ("fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.lxcfs", "fuseblk")
# These vanish with the container or at the next start of the machine.
FLEETING_KINDS = {"overlay": "the container's own layer", "tmpfs": "memory", "ramfs": "memory"}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One cache directory, as the disk shows it."""

    path: Path
    exists: bool
    writable: bool
    kind: str
    free_bytes: int
    inode_use: float

    @property
    def remote(self) -> bool:
        """Is it on a network file system?"""
        if self.kind.startswith("fuse"):
            return self.kind not in LOCAL_FUSE_KINDS
        return self.kind.startswith(NETWORK_KINDS)

    def __str__(self) -> str:
        made = "exists" if self.exists else "not made yet"
        access = "writable" if self.writable else "NOT writable"
        space = f"{self.free_bytes / (1 << 30):.1f} GiB free, {self.inode_use:.0%} of inodes used"
        return f"{self.path}: {made}, {access}; {self.kind}, {space}"


def home(machine: Machine) -> Verdict:
    """Can the libraries' default cache directories be created?"""
    value = machine.environment.get("HOME", "")
    advice = f"set HOME, or {CACHE_VARIABLE} and {TRITON_VARIABLE} to absolute directories, {EVERYWHERE}"
    if not value:
        return warn("HOME is not set", advice)
    if not Path(value).is_absolute():
        return fail(f"HOME={value} is not an absolute path", advice)
    place = survey(machine, Path(value))
    return ok(value) if place.writable else warn(f"HOME={value} is not writable", advice)


def user(machine: Machine) -> Verdict:
    """Has the user id a name? Container platforms like to use one that has none."""
    if machine.user is not None:
        return ok(f"{machine.user} (uid {machine.uid})")
    return warn(
        f"uid {machine.uid} has no passwd entry",
        "fine for prefetchd; a library that asks for the user's name may fail: set USER and HOME",
    )


def deep_gemm_cache(machine: Machine) -> Verdict:
    """Where will deep_gemm look, and can we publish there?"""
    line = deep_gemm_line(machine)
    if line is None:
        return missing("no usable deep_gemm is installed, nothing to check", "see the deep_gemm check")
    try:
        roots = _deep_gemm_roots(machine)
    except CompilerUnavailable as error:
        fix = f"set {CACHE_VARIABLE} to an absolute directory, {EVERYWHERE}"
        problem, _ = problem_and_fix(error, fix)
        return fail(problem, fix)
    variables = LAYOUTS[line].cache_variables
    origin = next((name for name in variables if name in machine.environment), "default")
    verdict = judge(survey(machine, roots[0]), origin, CACHE_VARIABLE)
    if len(roots) == 1:
        return verdict
    unreadable = [str(root) for root in roots[1:] if not os.access(root, os.R_OK | os.X_OK)]
    verdict = msgspec.structs.replace(
        verdict, found=f"{verdict.found}; only looked up: {', '.join(map(str, roots[1:]))}"
    )
    if unreadable and verdict.state == "ok":
        return warn(verdict.found, f"not readable: {', '.join(unreadable)}; mount them, or shorten {origin}")
    return verdict


def triton_cache(machine: Machine) -> Verdict:
    """Where will Triton look, and can we publish there?"""
    if machine.version("triton") is None:
        return missing("triton is not installed, nothing to check", "see the triton check")
    root, origin = _triton_root(machine)
    if not root.is_absolute():
        return fail(
            f"{root} ({origin}) is not an absolute path: each process looks under its own directory",
            f"set {TRITON_VARIABLE} to an absolute directory, {EVERYWHERE}",
        )
    return judge(survey(machine, root), origin, TRITON_VARIABLE)


def mounts(machine: Machine) -> Verdict:
    """Which directories must outlive the container?"""
    places = [survey(machine, path) for path in cache_directories(machine)]
    if not places:
        return missing("no directory is known", "see the cache checks")
    listed = " ".join(str(place.path) for place in places)
    kinds = [(place.path, FLEETING_KINDS.get(place.kind)) for place in places]
    fleeting = [f"{path} lies in {what}" for path, what in kinds if what]
    if fleeting:
        advice = "mount these directories from a disk that outlives the container"
        return warn(f"{listed} ({'; '.join(fleeting)})", advice)
    return ok(listed)


def cache_directories(machine: Machine) -> list[Path]:
    """Where the installed libraries look for compiled kernels; what cannot be told is left out."""
    found: list[Path] = []
    if deep_gemm_line(machine) is not None:
        # When the directories cannot be told, the check of its own says why.
        with contextlib.suppress(CompilerUnavailable):
            found.extend(_deep_gemm_roots(machine))
    if machine.version("triton") is not None:
        root, _ = _triton_root(machine)
        found.extend([root] if root.is_absolute() else [])
    return list(dict.fromkeys(found))


def survey(machine: Machine, path: Path) -> Place:
    """What the disk says about a directory, or about the nearest one above it that exists."""
    nearest = next(parent for parent in (path, *path.parents) if exists(parent))
    disk = os.statvfs(nearest)
    inodes = disk.f_files or 1  # file systems without a limit on inodes report none
    return Place(
        path=path,
        exists=nearest == path,
        writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        kind=_kind(machine, nearest),
        free_bytes=disk.f_bavail * disk.f_frsize,
        inode_use=1 - disk.f_ffree / inodes if disk.f_files else 0.0,
    )


def judge(place: Place, origin: str, variable: str) -> Verdict:
    """What a directory on such a disk means for publishing."""
    found = f"{place} ({origin})"
    elsewhere = f"set {variable} to another directory, {EVERYWHERE}"
    if not place.writable:
        return fail(found, f"nothing can be published there: make it writable for this user, or {elsewhere}")
    if place.remote:
        return warn(
            found,
            "a network file system: each look-up is a round trip, and other machines see new kernels late; "
            f"better a local disk: {elsewhere}",
        )
    if place.free_bytes < LOW_SPACE_BYTES:
        return warn(found, f"less than 1 GiB is free: make room, or {elsewhere}")
    if place.inode_use > HIGH_INODE_USE:
        return warn(found, f"inodes are nearly used up: remove files, or {elsewhere}")
    return ok(found)


def _deep_gemm_roots(machine: Machine) -> tuple[Path, ...]:
    """As the compiler will find them. Raises `CompilerUnavailable`."""
    # NVRTC has a check of its own, and the target decides no directory.
    environment = {name: value for name, value in machine.environment.items() if name != "DG_JIT_USE_NVRTC"}
    target = load_target(preset_names()[0])
    return DeepJit(target, environment, package_directory=deep_gemm_directory(machine)).roots()


def _triton_root(machine: Machine) -> tuple[Path, str]:
    """Triton's own rule: its variable, else `.triton/cache` in TRITON_HOME, else in the home directory."""
    if named := machine.environment.get(TRITON_VARIABLE):
        return Path(named), TRITON_VARIABLE
    if base := machine.environment.get("TRITON_HOME"):
        return Path(base) / ".triton/cache", "TRITON_HOME"
    # Without HOME, Python asks the passwd entry; without that too, Triton uses a directory called `~`.
    home = machine.environment["HOME"] or "/" if "HOME" in machine.environment else machine.passwd_home or "~"
    return Path(home) / ".triton/cache", "default"


def _kind(machine: Machine, path: Path) -> str:
    """The file system that holds a path: at the deepest mount point above it, the latest of equals."""
    real = path.resolve()
    holding = [mount for mount in machine.mounts if real.is_relative_to(mount.point)]
    deepest = max((len(Path(mount.point).parts) for mount in holding), default=0)
    kinds = [mount.kind for mount in holding if len(Path(mount.point).parts) == deepest]
    return kinds[-1] if kinds else "unknown file system"
