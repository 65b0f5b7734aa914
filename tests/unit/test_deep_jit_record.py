"""Records of DeepGEMM kernels: what the library generates is rebuilt, nothing else reaches nvcc or a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deep_jit_records import ASSERTION, BODY, HEAD, HEADER, OLD_HEAD, Written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefetchd.compilers.base import NotRebuildable
from prefetchd.compilers.deep_jit_payload import payload_of
from prefetchd.compilers.deep_jit_source import MAX_SOURCE, SourceRefused, parse_source
from prefetchd.targets import load_target


@pytest.fixture(params=[True, False], ids=["new", "old"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    return Written(tmp_path, new=request.param)


@pytest.fixture
def newer(tmp_path: Path) -> Written:
    return Written(tmp_path, new=True)


def test_record_becomes_the_job_it_was_made_from(written: Written) -> None:
    job = written.compiler.rebuild(written.record())
    payload = payload_of(job)

    assert (job.compiler, job.key) == ("deep_jit", written.key_of(written.source))
    assert (payload.source, list(payload.arguments)) == (written.source, written.arguments)


def test_rebuilt_job_is_compiled_and_published_like_a_traced_one(written: Written, tmp_path: Path) -> None:
    job = written.compiler.rebuild(written.record())
    staging = tmp_path / "staging"
    staging.mkdir()
    command = written.compiler.compile(job, staging)

    assert command.argv[0] == str(written.site.nvcc)
    assert str(staging / "entry/kernel.cu") in command.argv
    assert (staging / "entry/kernel.cu").read_text() == written.source


def test_meta_json_holds_this_packages_paths_whatever_the_record_says(newer: Written) -> None:
    meta = payload_of(newer.compiler.rebuild(newer.record())).meta

    assert meta is not None
    assert meta["config"] == {
        "python_library_root": str(newer.site.package),
        "extra_signature": "cutlass-481",
        "include_dirs": [newer.headers],
        "include_prefixes": ["deep_gemm/"],
    }
    assert (meta["command"], meta["compiler_info"]) == (None, None)


def test_record_of_another_fingerprint_is_refused_before_its_content_is_looked_at(written: Written) -> None:
    record = msgspec.structs.replace(written.record(), fingerprint="0123456789abcdef", rebuild=None)

    assert written.refusal(record).startswith("fingerprint '0123456789abcdef'")


def test_source_under_another_kernels_key_is_refused(written: Written) -> None:
    other = written.source.replace("512 / 16", "512 / 8")
    forged = written.record(key=written.key_of(written.source), source=other)

    assert "belong to another kernel" in written.refusal(forged)
    assert written.compiler.rebuild(written.record(source=other)).key == written.key_of(other)


@pytest.mark.parametrize(
    "key",
    [
        "", "../../etc", "made_up_gemm", "made_up_gemm.0123", "a/b." + "0" * 32, "." + "0" * 32,
        "made_up_gemm." + "0" * 32 + "\n", "made_up_gemm." + "A" * 32, "kernel.a.b." + "0" * 32,
    ],
)  # fmt: skip
def test_key_that_is_no_name_of_an_entry_is_refused(written: Written, key: str) -> None:
    assert written.refusal(written.record(key=key)).startswith("key ")


def test_key_of_the_other_line_is_refused(written: Written) -> None:
    key = written.key_of(written.source)
    other = f"kernel.{key}" if written.new else key.removeprefix("kernel.")

    assert "not of the form" in written.refusal(written.record(key=other))


FORGED: dict[str, Callable[[str], str]] = {
    "a second include": lambda text: text.replace(HEAD, HEAD + "#include </etc/passwd>\n"),
    "a quoted include": lambda text: text.replace(f"<{HEADER}>", f'"{HEADER}"'),
    "another directory's header": lambda text: text.replace("deep_gemm/impls/", "cutlass/arch/"),
    "a header outside": lambda text: text.replace("impls/sm90", "impls/../../../../etc/sm90"),
    "a header that is not there": lambda text: text.replace("sm90_made_up", "sm90_not_there"),
    "no include": lambda text: text.replace(f"#include <{HEADER}>", ""),
    "an embed": lambda text: text.replace(BODY, '\n#embed "/etc/passwd"\n' + BODY),
    "a pragma operator": lambda text: text.replace("auto ptr", '_Pragma("once") auto ptr'),
    "a digraph directive": lambda text: text.replace(BODY, "\n%:include </etc/passwd>\n" + BODY),
    "a trigraph directive": lambda text: text.replace(BODY, "\n??=include </etc/passwd>\n" + BODY),
    "a line continuation": lambda text: text.replace("auto ptr", "auto \\\nptr"),
    "a comment": lambda text: text.replace("auto ptr", "/* */ auto ptr"),
    "a line comment": lambda text: text.replace("auto ptr", "// here\n    auto ptr"),
    "a comment between numbers": lambda text: text.replace("512 / 16", "512 /* */ / 16"),
    "a second statement": lambda text: text.replace(">);\n", ">);\n    int x = 0;\n"),
    "a statement in front": lambda text: text.replace("auto ptr", "int x = 0;\n    auto ptr"),
    "inline assembly": lambda text: text.replace("auto ptr", 'asm(".incbin");\n    auto ptr'),
    "a second function": lambda text: text + "static void f() { }\n",
    "a second kernel": lambda text: text + BODY,
    "a definition in front": lambda text: text.replace(BODY, "int x;\n" + BODY),
    "another function": lambda text: text.replace("__instantiate_kernel", "main"),
    "an attribute": lambda text: text.replace("static void", "[[gnu::used]] static void"),
    "a gnu attribute": lambda text: text.replace("static void", "__attribute__((used)) static void"),
    "a raw string": lambda text: text.replace("true", 'R"(x)"'),
    "a string": lambda text: text.replace("true", '"x"'),
    "a character": lambda text: text.replace("true", "'x'"),
    "a lambda": lambda text: text.replace("true", "[]{ return 1; }()"),
    "a call": lambda text: text.replace("true", "f()"),
    "sizeof": lambda text: text.replace("true", "sizeof(int)"),
    "decltype": lambda text: text.replace("true", "decltype(0)"),
    "a built-in": lambda text: text.replace("true", "__builtin_trap"),
    "a ternary": lambda text: text.replace("true", "true ? 1 : 2"),
    "a longer number": lambda text: text.replace("512", "5" * 21),
    "deep templates": lambda text: text.replace("true", "a<a<a<a<a<0>>>>>"),
    "another namespace": lambda text: text.replace("namespace deep_gemm", "namespace std"),
    "a further namespace": lambda text: text.replace(HEAD, HEAD + "using namespace std;\n"),
    "an alias": lambda text: text.replace(HEAD, HEAD + "using x = int;\n"),
    "no namespace": lambda text: text.replace("using namespace deep_gemm;\n", ""),
    "an assertion of another kind": lambda text: text.replace(HEAD, HEAD + 'static_assert(true, "x");\n'),
    "an assertion with another message": lambda text: text.replace(
        HEAD, HEAD + ASSERTION.replace("Incorrect MQA", "Whatever")
    ),
    "two assertions": lambda text: text.replace(HEAD, HEAD + ASSERTION + ASSERTION),
    "a carriage return": lambda text: text.replace("\n", "\r\n"),
    "a tab": lambda text: text.replace("    ", "\t"),
    "a zero": lambda text: text + "\0",
    "letters of other alphabets": lambda text: text.replace("true", "tr\u00fce"),
    "a look-alike digit": lambda text: text.replace("512", "51\u0662"),
    "a byte order mark": lambda text: "\ufeff" + text,
    "a blank in front": lambda text: " " + text,
    "nothing": lambda text: "",
    "half of it": lambda text: text[: len(text) // 2],
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_source_is_refused_even_under_its_own_key(written: Written, name: str) -> None:
    forged = FORGED[name](written.source)
    assert forged != written.source

    try:
        key = written.key_of(forged)
    except OSError:
        # The library itself could not give it a key.
        key = written.key_of(written.source)
    assert written.refusal(written.record(key=key, source=forged)).startswith("rebuild.source: ")


@pytest.mark.parametrize("older", [True, False])
def test_generated_forms_are_accepted(older: bool) -> None:
    head = OLD_HEAD if older else ""
    inside = BODY.replace("() {\n", "() {\n    " + ASSERTION.strip() + "\n")
    rounded = inside.replace("assert(sizeof(", "assert((sizeof(").replace(
        ">) == 203776", ">) + 127) / 128 * 128 == 2560"
    )
    sparse = HEAD + "using namespace deep_gemm::layout::sparse_mqa_logits;\n"

    for text in (HEAD + BODY, HEAD + ASSERTION + BODY, HEAD + inside, HEAD + rounded, sparse + BODY):
        found = parse_source(head + text.replace("};", "}"), older=older)
        assert found == (HEADER, "made_up_gemm_impl")


def test_line_of_the_library_decides_about_the_first_line() -> None:
    for older, text in ((True, HEAD + BODY), (False, OLD_HEAD + HEAD + BODY)):
        with pytest.raises(SourceRefused, match="line 1"):
            parse_source(text, older=older)


def test_refusal_of_a_source_names_line_and_reason() -> None:
    text = HEAD + BODY.replace("true", "true, '")

    with pytest.raises(SourceRefused, match=r"line 10: \"'\": a character"):
        parse_source(text, older=False)


def test_longest_source_is_bounded() -> None:
    text = HEAD + BODY.replace("true", ", ".join(["true"] * MAX_SOURCE))

    with pytest.raises(SourceRefused, match=f"more than {MAX_SOURCE}"):
        parse_source(text, older=False)


@pytest.mark.parametrize(
    "argument",
    [
        "-Xcompiler", "-Xcompiler=-fplugin=x.so", "--compiler-options=-fplugin=x.so", "--options-file=x",
        "-optf", "-include", "--pre-include", "-include=/etc/passwd", "-ccbin", "-ccbin=/tmp/cc", "--run",
        "--compiler-bindir=/tmp", "--keep", "--keep-dir=/tmp", "-D", "-Dx=y", "-I/tmp", "-isystem", "-L/tmp",
        "-lx", "--shared", "--ptxas-options=--output-file=x", "-Xptxas", "--compiler-options=-fPIC,-B/tmp",
        "-dlto", "-o", "/etc/passwd", "extra.cu", "@file", "--compiler-options=-fPIC -B/tmp", "", "\0",
        "-std=c++20;id", "-gencode=arch=compute_90,code=sm_90;id", "--save-temps", "-MD", "-MF", "--dryrun",
    ],
)  # fmt: skip
def test_argument_that_the_library_does_not_give_is_refused(written: Written, argument: str) -> None:
    for arguments in ([*written.arguments, argument], [argument, *written.arguments]):
        assert written.refusal(written.record(arguments=arguments)).startswith("rebuild.arguments: ")


def test_arguments_name_source_and_output_once_each(written: Written) -> None:
    output = "--output-file" if written.new else "-o"
    kept = [each for each in written.arguments if each not in ("{source}", "{output}", output)]

    for arguments in (
        kept,
        [*written.arguments, "{source}"],
        [*written.arguments, output, "{output}"],
        ["{source}", output, "{source}", *kept],
        ["{source}", output, "/etc/passwd", *kept],
        ["{source}", *kept, output],
    ):
        assert written.refusal(written.record(arguments=arguments)).startswith("rebuild.arguments: ")


def test_headers_are_the_installed_packages(written: Written) -> None:
    elsewhere = [each.replace(written.headers, "/tmp/include") for each in written.arguments]

    assert "only" in written.refusal(written.record(arguments=elsewhere))


def test_architecture_is_the_targets(written: Written) -> None:
    other = [each.replace("sm_90a", "sm_100a") for each in written.arguments]
    both = [*written.arguments, "-gencode=arch=compute_90a,code=sm_100a"]
    none = [each for each in written.arguments if "sm_90a" not in each]

    for arguments in (other, both, none):
        assert "the target is sm_90" in written.refusal(written.record(arguments=arguments))
    with pytest.raises(NotRebuildable, match="fingerprint"):
        written.site.compiler(load_target("b200")).rebuild(written.record())


def test_hook_is_never_taken_from_a_record(newer: Written) -> None:
    assert newer.meta is not None
    newer.meta["compiler_options"]["post_hook"] = "hook.py"

    assert "post_hook 'hook.py' names a program to run" in newer.refusal(newer.record())


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("compiler_options", "nvcc_flags", ["-Xcompiler"]),
        ("compiler_options", "arch", "90a; id"),
        ("compiler_options", "optimize_level", "3 -x"),
        ("compiler_options", "post_hook", 7),
        ("config", "extra_signature", "a b"),
        ("config", "include_dirs", ["x"] * 5),
        ("config", "include_dirs", {"x": 1}),
    ],
)
def test_meta_with_other_values_is_refused(newer: Written, part: str, field: str, value: Any) -> None:
    assert newer.meta is not None
    newer.meta[part][field] = value

    assert newer.refusal(newer.record()).startswith("rebuild.meta: ")


@pytest.mark.parametrize(
    "rebuild",
    [
        None, {}, {"source": 1, "arguments": []}, {"source": "", "arguments": "x"},
        {"source": "", "arguments": [1]}, {"source": "", "arguments": [["x"]]},
        {"source": "x" * (MAX_SOURCE + 1), "arguments": []}, {"source": "", "arguments": [""] * 100},
        {"source": "", "arguments": ["x" * 5000]}, {"source": "", "arguments": [], "meta": [1]},
    ],
)  # fmt: skip
def test_rebuild_of_another_form_is_refused(written: Written, rebuild: dict[str, Any] | None) -> None:
    record = msgspec.structs.replace(written.record(), rebuild=rebuild)

    assert written.refusal(record).startswith("rebuild")


def test_unknown_fields_of_a_newer_writer_are_ignored(written: Written) -> None:
    assert written.compiler.rebuild(written.record(call="fp8_gemm_nt(...)", later={"x": [1]}))


PROPERTY = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ALPHABET = st.sampled_from("<>(){}[]#\"'\\/*?%&:;,.=+-_ \n\tabfx019") | st.characters()


@PROPERTY
@given(data=st.data())
def test_no_change_of_a_source_yields_another_kernel_under_the_same_key(written: Written, data: Any) -> None:
    start = data.draw(st.integers(0, len(written.source)))
    end = data.draw(st.integers(start, min(start + 8, len(written.source))))
    put = data.draw(st.text(ALPHABET, max_size=8))
    changed = written.source[:start] + put + written.source[end:]
    if changed == written.source:
        return

    written.refusal(written.record(key=written.key_of(written.source), source=changed))


@PROPERTY
@given(data=st.data())
def test_whatever_is_accepted_has_one_include_and_one_instance(written: Written, data: Any) -> None:
    pieces = st.sampled_from(
        [
            HEAD,
            BODY,
            ASSERTION,
            OLD_HEAD,
            "#include <x>\n",
            "using namespace std;\n",
            "{",
            "}",
            ";",
            "/**/",
            "true",
        ]
    )
    text = "".join(data.draw(st.lists(pieces, max_size=5)))
    try:
        parse_source(text, older=not written.new)
    except SourceRefused:
        return

    assert text.count("#") == text.count("__instantiate_kernel") == text.count("&") == 1
    assert "/*" not in text
    assert text.count("//") == (0 if written.new else 1)


@PROPERTY
@given(arguments=st.lists(st.text(max_size=30) | st.sampled_from(["{source}", "-o", "{output}"]), max_size=8))
def test_no_other_arguments_are_accepted(written: Written, arguments: list[str]) -> None:
    written.refusal(written.record(arguments=arguments))
