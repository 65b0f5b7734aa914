"""DeepGEMM's cache, traced, filled and judged in both layouts, with a library and an nvcc made for tests."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from fake_cubin import fake_cubin
from fake_deep_gemm import H200, CompileFailed, Site

from prefetchd.compilers.base import ArtifactInvalid, CompilerUnavailable, EntryState, Job
from prefetchd.compilers.deep_jit import DeepJit
from prefetchd.compilers.deep_jit_payload import payload_of
from prefetchd.targets import load_target


@pytest.fixture(params=[True, False], ids=["new", "old"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(tmp_path, new=request.param)


def scratch_in(site: Site, name: str = "scratch") -> Path:
    scratch = site.directory / name
    scratch.mkdir(exist_ok=True)
    return scratch


def captured(
    site: Site, *sources: str, scratch: str = "scratch", compiler: DeepJit | None = None
) -> list[Job]:
    compiler = compiler or site.compiler()
    with compiler.capture(scratch_in(site, scratch)) as capture:
        for source in sources:
            site.traced_library().compile("gemm", source)
        return capture.jobs()


def made(site: Site, job: Job, *, compiler: DeepJit | None = None) -> Path:
    """A staging directory in which the job was compiled by the test's own hand."""
    compiler = compiler or site.compiler()
    staging = scratch_in(site, f"staging-{job.key}")
    command = compiler.compile(job, staging)
    assert os.spawnve(os.P_WAIT, command.argv[0], list(command.argv), command.environment) == 0
    return staging


def publish_all(site: Site, jobs: list[Job]) -> None:
    compiler = site.compiler()
    for job in jobs:
        staging = made(site, job)
        compiler.verify(job, staging)
        assert compiler.publish(job, staging, compiler.cache_root())


def test_capture_names_every_variant_once_and_in_order(site: Site) -> None:
    jobs = captured(site, "first", "second", "first")

    assert [payload_of(job).source for job in jobs] == ["first", "second"]
    assert len({job.key for job in jobs}) == 2


def test_captured_keys_are_those_of_the_engine(site: Site) -> None:
    [job] = captured(site, "source")

    assert site.library().compile("gemm", "source").name == job.key


def test_capture_compiles_nothing_and_leaves_the_engines_cache_alone(site: Site) -> None:
    before = dict(os.environ)
    site.nvcc.write_text(site.nvcc.read_text().replace("for a", "touch compiled; for a"))

    captured(site, "source")

    assert not site.root.exists()
    assert not list(site.directory.rglob("compiled"))
    assert dict(os.environ) == before


def test_a_payload_does_not_depend_on_where_it_was_traced(site: Site) -> None:
    assert captured(site, "source", scratch="here") == captured(site, "source", scratch="there")


def test_capture_goes_on_where_a_crashed_process_stopped(site: Site) -> None:
    first = captured(site, "first")

    assert captured(site, "second")[: len(first)] == first


def test_published_entries_serve_the_engine(site: Site) -> None:
    jobs = captured(site, "first", "second")
    publish_all(site, jobs)
    engine = site.library()

    served = [engine.compile("gemm", source) for source in ("first", "second")]

    assert engine.starts == 0
    assert [entry.name for entry in served] == [job.key for job in jobs]
    assert [site.compiler().look_up(job.key) for job in jobs] == [EntryState.PUBLISHED] * 2


def test_a_published_entry_holds_exactly_the_files_of_its_layout(site: Site) -> None:
    [job] = captured(site, "source")
    publish_all(site, [job])

    names = {path.name for path in (site.root / "cache" / job.key).iterdir()}

    expected = {"kernel.cu", "kernel.cubin"} | ({"meta.json", ".committed"} if site.new else set())
    assert names == expected


def test_published_metadata_names_the_real_nvcc_and_the_final_paths(tmp_path: Path) -> None:
    site = Site(tmp_path)
    [job] = captured(site, "source")
    publish_all(site, [job])
    entry = site.root / "cache" / job.key
    text = (entry / "meta.json").read_text()
    meta = json.loads(text)

    assert list(meta) == ["command", "config", "compiler_info", "compiler_options"]
    assert meta["command"].split()[:5] == [
        str(site.nvcc), str(entry / "kernel.cu"), "--cubin", "--output-file", str(entry / "kernel.cubin"),
    ]  # fmt: skip
    assert meta["compiler_info"] == {"path": str(site.nvcc), "version": site.compiler().nvcc.version_text}
    for trace in ("scratch", "staging", "stand_in", "{"):
        assert trace not in meta["command"]


def test_forbid_serves_what_is_cached_and_writes_nothing(site: Site) -> None:
    publish_all(site, captured(site, "cached"))
    before = sorted(site.root.rglob("*"))

    with site.compiler().forbid(scratch_in(site, "proof")) as misses:
        site.traced_library().compile("gemm", "cached")
        with pytest.raises(CompileFailed, match="compiling is forbidden"):
            site.traced_library().compile("gemm", "absent")
        missed = misses.jobs()

    assert [payload_of(job).source for job in missed] == ["absent"]
    assert sorted(site.root.rglob("*")) == before


def test_forbid_on_a_root_that_does_not_exist_creates_nothing(site: Site) -> None:
    with site.compiler().forbid(scratch_in(site)) as misses:
        with pytest.raises(CompileFailed):
            site.traced_library().compile("gemm", "absent")
        assert len(misses.jobs()) == 1

    assert not site.root.exists()


def test_forbid_goes_on_where_a_crashed_process_stopped(site: Site) -> None:
    publish_all(site, captured(site, "cached"))
    for source in ("first", "second"):
        with site.compiler().forbid(scratch_in(site, "proof")) as misses, pytest.raises(CompileFailed):
            site.traced_library().compile("gemm", source)

    assert [payload_of(job).source for job in misses.jobs()] == ["first", "second"]


def test_a_miss_has_the_digest_of_its_job(site: Site) -> None:
    compiler = site.compiler()
    [job] = captured(site, "source")
    with compiler.forbid(scratch_in(site, "proof")) as misses, pytest.raises(CompileFailed):
        site.traced_library().compile("gemm", "source")

    [miss] = misses.jobs()

    assert compiler.digest(miss) == compiler.digest(job)
    assert compiler.digest(captured(site, "other", scratch="other")[0]) != compiler.digest(job)


def test_an_entry_that_the_engine_made_meanwhile_is_kept(site: Site) -> None:
    [job] = captured(site, "source")
    staging = made(site, job)
    entry = site.library().compile("gemm", "source")
    before = {path.name: path.stat().st_ino for path in entry.iterdir()}

    assert not site.compiler().publish(job, staging, site.root)
    assert {path.name: path.stat().st_ino for path in entry.iterdir()} == before


def test_a_further_root_counts_as_published_but_a_corrupt_one_does_not(tmp_path: Path) -> None:
    site = Site(tmp_path)
    [job] = captured(site, "source")
    publish_all(site, [job])
    compiler = site.compiler(DG_JIT_CACHE_DIR=f"{tmp_path / 'first'}:{site.root}")

    assert compiler.cache_root() == tmp_path / "first"
    assert compiler.look_up(job.key) is EntryState.PUBLISHED
    (site.root / "cache" / job.key / "kernel.cubin").write_bytes(b"")
    assert compiler.look_up(job.key) is EntryState.MISSING


def test_forbid_reads_every_root(tmp_path: Path) -> None:
    site = Site(tmp_path)
    publish_all(site, captured(site, "source"))
    compiler = site.compiler(DG_JIT_CACHE_DIR=f"{tmp_path / 'first'}:{site.root}")

    with compiler.forbid(scratch_in(site, "proof")) as misses:
        site.traced_library().compile("gemm", "source")
        assert misses.jobs() == []


@pytest.mark.parametrize(
    ("damage", "state"),
    [
        (lambda entry: shutil.rmtree(entry), EntryState.MISSING),
        (lambda entry: [path.unlink() for path in entry.iterdir()], EntryState.MISSING),
        (lambda entry: (entry / "kernel.cu").unlink(), EntryState.CORRUPT),
        (lambda entry: (entry / "kernel.cubin").unlink(), EntryState.CORRUPT),
        (lambda entry: (entry / "kernel.cubin").write_bytes(b""), EntryState.CORRUPT),
        (lambda entry: (entry / "kernel.cubin").write_bytes(fake_cubin()[:-1]), EntryState.CORRUPT),
        (lambda entry: (entry / "kernel.cubin").write_bytes(fake_cubin(100)), EntryState.CORRUPT),
        (lambda entry: (shutil.rmtree(entry), entry.write_text("file")), EntryState.CORRUPT),
        (lambda entry: (shutil.rmtree(entry), entry.symlink_to("nowhere")), EntryState.CORRUPT),
        (lambda entry: (shutil.rmtree(entry), entry.symlink_to(entry)), EntryState.CORRUPT),
        (lambda entry: (entry / "kernel.ptx").touch(), EntryState.PUBLISHED),
    ],
    ids=[
        "gone",
        "empty",
        "no source",
        "no cubin",
        "zero",
        "truncated",
        "foreign",
        "file",
        "dead link",
        "link to itself",
        "with dump",
    ],
)
def test_an_entry_is_judged_by_its_files(site: Site, damage, state: EntryState) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    [job] = captured(site, "source")
    publish_all(site, [job])

    damage(site.root / "cache" / job.key)

    assert site.compiler().state(job.key, site.root) is state


def test_an_entry_without_its_marker_is_corrupt(tmp_path: Path) -> None:
    site = Site(tmp_path)
    [job] = captured(site, "source")
    publish_all(site, [job])

    (site.root / "cache" / job.key / ".committed").unlink()

    assert site.compiler().state(job.key, site.root) is EntryState.CORRUPT


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        (b"", "empty"),
        (fake_cubin()[:40], "40 bytes"),
        (fake_cubin(100), "sm_100, not for sm_90"),
    ],
)
def test_an_unusable_output_is_not_accepted(site: Site, content: bytes | None, text: str) -> None:
    [job] = captured(site, "source")
    staging = scratch_in(site, "staging")
    site.compiler().compile(job, staging)
    if content is not None:
        (staging / "entry/kernel.cubin").write_bytes(content)

    with pytest.raises(ArtifactInvalid, match=text):
        site.compiler().verify(job, staging)


def test_a_compile_gets_no_preload_and_its_own_temporary_directory(site: Site) -> None:
    compiler = site.compiler(LD_PRELOAD="shim.so", LD_LIBRARY_PATH="/shim", NVCC_CCBIN="/usr/bin/gcc")
    [job] = captured(site, "source")

    command = compiler.compile(job, scratch_in(site, "staging"))

    assert "LD_PRELOAD" not in command.environment
    assert "LD_LIBRARY_PATH" not in command.environment
    assert command.environment["NVCC_CCBIN"] == "/usr/bin/gcc"
    assert Path(command.environment["TMPDIR"]).is_relative_to(site.directory / "staging")
    assert command.argv[0] == str(site.nvcc)


def test_a_hook_is_refused_by_name(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.compiler().capture(scratch_in(site)) as capture:
        site.traced_library().compile("gemm", "source", hook="tools/patch.py")
        [job] = capture.jobs()

    with pytest.raises(CompilerUnavailable, match=r"tools/patch\.py"):
        site.compiler().compile(job, scratch_in(site, "staging"))


def test_a_trace_on_another_device_is_refused(site: Site) -> None:
    with site.compiler().capture(scratch_in(site)) as capture:
        site.traced_library().compile("gemm", "source", arch="sm_100f")

    with pytest.raises(CompilerUnavailable, match="compiles for sm_100 while NVIDIA H200 is sm_90"):
        capture.jobs()


def test_family_architectures_belong_to_their_target(site: Site) -> None:
    with site.compiler(load_target("b200")).capture(scratch_in(site)) as capture:
        site.traced_library().compile("gemm", "source", arch="sm_100f")
        assert len(capture.jobs()) == 1


def test_debug_switches_do_not_run_tools_on_a_placeholder(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.compiler(DG_JIT_DEBUG="1", DG_JIT_DUMP_SASS="1").capture(scratch_in(site)):
        seen = {name: value for name, value in os.environ.items() if name.startswith("DG_JIT_")}

    assert seen["DG_JIT_DEBUG"] == seen["DG_JIT_DUMP_SASS"] == seen["DG_JIT_DUMP_PTX"] == "0"
    assert seen["DG_JIT_WITH_LINEINFO"] == seen["DG_JIT_PTXAS_VERBOSE"] == "1"


def test_the_fingerprint_tells_what_changes_a_kernel(site: Site) -> None:
    base = dict(site.compiler().fingerprint())

    changed = dict(
        site.compiler(load_target("b200"), NVCC_APPEND_FLAGS="-g", DG_JIT_CPP_STANDARD="17").fingerprint()
    )

    differing = {name for name in base | changed if base.get(name) != changed.get(name)}
    assert differing == {
        "deep_jit.architecture", "deep_jit.env.NVCC_APPEND_FLAGS", "deep_jit.env.DG_JIT_CPP_STANDARD",
    }  # fmt: skip


def test_the_fingerprint_ignores_what_changes_no_kernel(site: Site) -> None:
    changed = site.compiler(DG_PRINT_CONFIGS="1", DG_JIT_DUMP_PTX="1", DG_JIT_NVCC_COMPILER=str(site.nvcc))

    assert changed.fingerprint() == site.compiler().fingerprint()


def test_the_fingerprint_sees_a_changed_header(site: Site) -> None:
    before = site.compiler().fingerprint()["deep_jit.include"]

    (site.package / "include/deep_gemm/common.cuh").write_text("// changed")

    assert site.compiler().fingerprint()["deep_jit.include"] != before


def test_default_root_is_the_librarys_own(site: Site) -> None:
    del site.environment["DG_JIT_CACHE_DIR"]

    root = site.compiler(HOME="/home/someone").cache_root()

    assert root == Path("/home/someone") / (".dj" if site.new else ".deep_gemm")


def test_home_unset_is_explained(site: Site) -> None:
    del site.environment["DG_JIT_CACHE_DIR"]

    with pytest.raises(CompilerUnavailable, match="HOME is '' and DG_JIT_CACHE_DIR is unset"):
        site.compiler()


@pytest.mark.parametrize("value", ["relative/cache", "", "~/cache"])
def test_a_root_that_is_not_absolute_is_explained(site: Site, value: str) -> None:
    with pytest.raises(CompilerUnavailable, match="not an absolute path"):
        site.compiler(DG_JIT_CACHE_DIR=value)


@pytest.mark.parametrize("value", ["/a:", "/a::/b", ":/a", "/a:b"])
def test_a_list_with_an_unusable_root_is_explained(tmp_path: Path, value: str) -> None:
    with pytest.raises(CompilerUnavailable, match="not an absolute path"):
        Site(tmp_path).compiler(DG_JIT_CACHE_DIR=value)


def test_several_roots_are_refused_by_the_line_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(CompilerUnavailable, match="takes exactly one"):
        Site(tmp_path, new=False).compiler(DG_JIT_CACHE_DIR="/a:/b")


def test_nvrtc_is_refused_with_the_fix(site: Site) -> None:
    with pytest.raises(CompilerUnavailable, match=r"no stand-in.*Unset DG_JIT_USE_NVRTC"):
        site.compiler(DG_JIT_USE_NVRTC="1")

    assert site.compiler(DG_JIT_USE_NVRTC="0").target is H200


def test_a_scratch_directory_that_a_shell_would_split_is_refused(site: Site) -> None:
    with (
        pytest.raises(CompilerUnavailable, match="Set TMPDIR"),
        site.compiler().capture(scratch_in(site, "a b")),
    ):
        pass
