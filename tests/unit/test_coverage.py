from prefetchd.compilers.base import Job
from prefetchd.coverage import Ledger
from prefetchd.pipeline import Ending, JobOutcome
from prefetchd.trace import Failure, Report


def job(key: str) -> Job:
    return Job(compiler="deep_jit", key=key, payload=b"")


def report(*keys: str, failures: tuple[Failure, ...] = ()) -> Report:
    return Report(id=0, seconds=0.5, jobs=tuple(job(key) for key in keys), failures=failures)


def ledger() -> Ledger:
    made = Ledger("h200", 64, dry_run=False)
    made.add_provider("deep_gemm")
    made.add_provider("other")
    return made


def test_variant_shared_by_sweeps_is_counted_once_but_shown_in_each() -> None:
    books = ledger()

    books.traced("deep_gemm", "site a", 64, report("x", "y"))
    books.traced("deep_gemm", "site b", 64, report("y", "z"))

    figures = books.coverage.providers["deep_gemm"]
    assert (figures.requests, figures.variants) == (128, 3)
    assert [detail.variants for detail in figures.requests_detail] == [2, 2]
    assert [each.key for each in books.jobs()] == ["x", "y", "z"]


def test_variant_belongs_to_the_provider_that_asked_first() -> None:
    books = ledger()
    books.traced("other", "site", 1, report("x"))
    books.traced("deep_gemm", "site", 1, report("x"))

    books.hit(job("x"))

    assert books.coverage.providers["other"].hits == 1
    assert books.coverage.providers["deep_gemm"].variants == 0


def test_outcomes_are_counted_by_ending_and_cpu_seconds_add_up() -> None:
    books = ledger()
    books.traced("deep_gemm", "site", 3, report("x", "y", "z"))

    books.ended(JobOutcome(job=job("x"), ending=Ending.COMPILED, cpu_s=2.0))
    books.ended(JobOutcome(job=job("y"), ending=Ending.FOUND))
    books.ended(JobOutcome(job=job("z"), ending=Ending.FAILED, text="nvcc: exit status 2", cpu_s=1.0))

    figures = books.coverage.providers["deep_gemm"]
    assert (figures.compiled, figures.hits, figures.failed) == (1, 1, 1)
    assert figures.problems[0].text == "nvcc: exit status 2"
    assert books.coverage.compile_cpu_s == 3.0
    assert not books.coverage.complete


def test_request_that_failed_in_trace_and_proof_is_uncovered_once() -> None:
    failure = Failure(request="op m=3", kind="error", text="dim == 2", requests=1)
    other = Failure(request="op m=4", kind="miss", text="compile forbidden", requests=1)
    books = ledger()
    traced = report("x", failures=(failure,))
    books.traced("deep_gemm", "op m=1..4", 4, traced)

    books.proved("deep_gemm", 4, report(failures=(failure, other)), traced)

    assert books.coverage.providers["deep_gemm"].uncovered == 2


def test_listed_failure_that_stands_for_others_never_counts_more_than_there_are() -> None:
    books = ledger()
    traced = report("x", failures=(Failure(request="op m=1", kind="error", text="dim", requests=3),))
    books.traced("deep_gemm", "op m=1..4", 4, traced)
    proof = report(failures=(Failure(request="op m=2", kind="miss", text="forbidden", requests=3),))

    books.proved("deep_gemm", 4, proof, traced)

    assert books.coverage.providers["deep_gemm"].uncovered == 4


def test_site_that_no_family_knows_is_never_covered() -> None:
    books = ledger()

    books.unknown("shared.up", "fp9_gemm", 64)

    (problem,) = books.coverage.problems
    assert (problem.kind, problem.requests) == ("unknown", 64)
    assert "'fp9_gemm'" in problem.text
    assert not books.coverage.complete


def test_nothing_failed_and_all_proved_is_complete() -> None:
    books = ledger()
    traced = report("x")
    books.traced("deep_gemm", "op m=1..4", 4, traced)
    books.ended(JobOutcome(job=job("x"), ending=Ending.COMPILED))
    books.proved("deep_gemm", 4, report(), traced)

    assert books.coverage.complete
