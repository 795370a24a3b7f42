"""bench-mtp and recommend-mtp as people use them, on the example, with real engines."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from bench import measure as measuring
from bench.cli import bench_main, recommend_main
from bench.matrix import OWN, Cell, Load
from bench.measure import TASKS, Options, measure
from bench.store import Cost, HeadScore, Record, Store
from bench.summary import Results
from tests.conftest import EXAMPLE, checkpoint
from tests.verify.test_http_engine import llama_server
from verify.engines.base import Request
from verify.engines.llama_cpp import Engine, run

pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")

SMALL = ["--prompts", "2", "--tokens", "24", "--threads", "1", "--quiet"]


@pytest.fixture(scope="module")
def folder(conversions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small matrix: two files, two heads, two tasks, two temperatures."""
    out = tmp_path_factory.mktemp("bench")
    files = [str(conversions("dense", "bundled") / f"{mix}.gguf") for mix in ("Q4_K_M", "BF16")]
    code = bench_main([
        *files, "--source", str(EXAMPLE), "--tasks", "code,creative", "--temperature", "0,0.7", "--drafts", "0-2",
        "--mtp-types", "Q8_0,match", "--runs", "2", "-o", str(out), *SMALL,
    ])  # fmt: skip
    assert code == 0
    return out


def test_every_cell_was_measured(folder: Path) -> None:
    """Two runs of each, with everything that a cell tells."""
    results = Results(Store(folder))
    assert len(results.cells) == 2 * (1 + 2 * 2) * 2 * 2
    assert {s.runs for s in results.cells.values()} == {2}
    assert not results.failed
    for stats in results.cells.values():
        assert "xllamacpp" in stats.engine_build
        assert stats.tokens_per_s.low > 0
        assert stats.prompt_per_s > 0
        assert stats.peak_bytes
        assert 20e6 < stats.peak_bytes < 1e9
    for stats in results.drafting:
        assert stats.speedup
        assert stats.speedup.low <= stats.speedup.value <= stats.speedup.high
        assert stats.acceptance
        assert 0.2 < stats.acceptance <= 1  # at 0.7 as well (S38)
        assert len(stats.by_position) == stats.cell.load.drafts
        assert sum(stats.lengths) == pytest.approx(1)
    greedy = [s for s in results.drafting if not s.cell.temperature and s.cell.load.file.endswith("BF16.gguf")]
    assert all(s.identical == (4, 4) for s in greedy)


def test_steps_were_costed(folder: Path) -> None:
    """By made-up acceptance, for every file and head; more drafts cost more."""
    costs = Results(Store(folder)).costs
    assert len(costs) == 2 * 2 * 2
    assert all(s > 0 for c in costs for s in c.step_s.values())
    assert sum(c.step_s[0] for c in costs) < sum(c.step_s[2] for c in costs)
    assert any(c.draft_s for c in costs)


@pytest.mark.parametrize(("rates", "share"), [((0.0, 0.0), 0), ((1.0, 1.0), 1)])
def test_acceptance_that_is_made_up(conversions, rates: tuple[float, ...], share: int) -> None:
    """The engine accepts nothing, or everything, as it is told: what steps cost is measured with the first."""
    engine = Engine(str(conversions("dense", "bundled") / "BF16.gguf"), drafts=2, synthetic=rates)
    found = run(engine, [Request((5, 6, 7), 21)])
    assert found.drafted
    assert found.accepted == share * found.drafted


def test_heads_were_judged_on_one_trunk(folder: Path) -> None:
    """Both types, every task; a head of more bits is about as good here."""
    scores = Results(Store(folder)).scores
    assert len(scores) == 2 * 2 * 2
    for score in scores:
        (first, of), (both, _) = score.counts
        assert 0.4 * of < first <= of
        assert both <= first


def test_what_is_measured_is_not_measured_again(folder: Path, conversions, monkeypatch) -> None:
    """The same command does nothing; a new number of drafts runs alone, without changing what is there."""
    before = (folder / "cells.jsonl").read_bytes()
    ran: list[Load] = []
    real = measuring.LlamaCpp.run

    def run(self: measuring.LlamaCpp, load: Load, *rest: object) -> object:
        ran.append(load)
        return real(self, load, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(measuring.LlamaCpp, "run", run)
    files = [conversions("dense", "bundled") / f"{mix}.gguf" for mix in ("Q4_K_M", "BF16")]
    options = Options(
        files, EXAMPLE, tasks=("code", "creative"), temperatures=(0.0, 0.7), drafts=(0, 1, 2), heads=("Q8_0", "match"), runs=2,
        prompts=2, tokens=24, threads=1, costs=False,
    )  # fmt: skip
    measure(options, folder)
    assert ran == []
    assert (folder / "cells.jsonl").read_bytes() == before


def test_cut_off_in_the_middle(conversions, tmp_path: Path) -> None:
    """What was measured stays, and is not run twice."""
    file = conversions("dense", "bundled") / "BF16.gguf"
    options = Options([file], tasks=("code",), drafts=(1, 2), runs=1, prompts=1, tokens=8, threads=1, costs=False)

    def interrupt(done: int, _total: int, _what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(options, tmp_path, interrupt)
    first = (tmp_path / "cells.jsonl").read_text()
    assert first.count("\n") == 2
    measure(options, tmp_path)
    whole = (tmp_path / "cells.jsonl").read_text()
    assert whole.startswith(first)
    assert len({r.cell for r in Store(tmp_path) if isinstance(r, Record)}) == whole.count("\n") == 3


def test_report(folder: Path) -> None:
    """Page, table and lines have every cell; the page needs nothing else."""
    cells = len(Results(Store(folder)).cells)
    rows = list(csv.DictReader((folder / "results.csv").open()))
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(rows) == len(lines) == cells
    assert {r["schema"] for r in lines} == {1}
    drafted = [r for r in rows if r["drafts"] == "2"]
    assert all(float(r["speedup_low"]) <= float(r["speedup"]) <= float(r["speedup_high"]) for r in drafted)
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 1 + 2 + 2 + 1
    assert not re.search(r"<script|<link|<img|src=|href=['\"]http", page)
    for words in ("What to use", "What a step costs", "Types of the head", "Whole requests", "All cells"):
        assert words in page


def test_recommend(folder: Path, tmp_path: Path, capsys) -> None:
    """Agrees with the best that was measured; writes preset and policy."""
    assert recommend_main([str(folder), "--type", "BF16", "--task", "code", "--json", "-o", str(tmp_path)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["recommendations"]
    results = Results(Store(folder))
    speeds = [
        s.speedup.value for s in results.drafting
        if s.speedup and s.cell.task == "code" and "BF16" in s.cell.load.file and not s.cell.temperature
    ]  # fmt: skip
    assert found["candidates"][0]["speedup"] == pytest.approx(max(speeds))
    assert found["expected_speedup"] >= 1
    assert found["on"] == (found["drafts"] > 0)
    assert (tmp_path / "preset.ini").read_text().startswith("version = 1")
    assert recommend_main([str(folder)]) == 0
    assert "n = 2" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_torch_and_other_axes(conversions, tmp_path: Path, kind: str) -> None:
    """The torch engine, and llama.cpp with p-min, slots and a filled context; experts are known of a MoE."""
    file = conversions(kind, "bundled") / "BF16.gguf"
    small = {"tasks": ("code",), "runs": 1, "prompts": 2, "tokens": 12, "threads": 1}
    measure(Options([file], checkpoint(kind), engines=("torch",), drafts=(2,), **small), tmp_path)
    measure(
        Options([file], checkpoint(kind), drafts=(2,), p_mins=(0.0, 0.9), slots=(1, 2), contexts=(0, 64), **small),
        tmp_path,
    )
    results = Results(Store(tmp_path))
    path = str(file)
    torch = results.cells[Cell(Load("torch", path, OWN, 2), "code")]
    assert torch.engine_build.startswith("torch")
    assert torch.identical == (2, 2)
    llama = results.cells[Cell(Load("llama.cpp", path, OWN, 2), "code")]
    assert torch.acceptance == pytest.approx(llama.acceptance, abs=0.25)
    sure = results.cells[Cell(Load("llama.cpp", path, OWN, 2, 0.9), "code")]
    assert sure.drafted is not None
    assert llama.drafted is not None
    assert sure.drafted < llama.drafted
    deep = next(r for r in results.records if r.cell == Cell(Load("llama.cpp", path, OWN, 2), "code", 0.0, 64))
    assert deep.prompt_n == [64, 64]
    assert results.cells[Cell(Load("llama.cpp", path, OWN, 2, slots=2), "code")].identical == (2, 2)
    costs = [i for i in Store(tmp_path) if isinstance(i, Cost)]
    assert (costs[0].experts > 0) == (kind == "moe")
    assert any(isinstance(i, HeadScore) for i in Store(tmp_path))


def test_engines_side_by_side(conversions, tmp_path: Path, capsys) -> None:
    """In process and by URL in one table, texts compared."""
    file = conversions("dense", "bundled") / "BF16.gguf"
    with llama_server(file, 2) as drafting, llama_server(file, 0) as plain:
        code = bench_main([
            str(file), "--engine", "llama.cpp", "--engine", drafting, "--plain-engine", plain, "--tasks", "code", "--drafts", "2",
            "--runs", "1", "--no-costs", "-o", str(tmp_path), "--json", *SMALL,
        ])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    cells = report["cells"]
    assert code == 0
    assert report["settings"]["prompt_cache"] is False
    assert report["settings"]["tokens"] == 24
    assert len(cells) == 4
    mine, theirs = (next(c for c in cells if c["drafts"] and c["engine"].startswith(e)) for e in ("llama.cpp", "http"))
    assert theirs["drafts"] == 2
    assert theirs["identical"] == mine["identical"] == 2
    assert theirs["acceptance"] == pytest.approx(mine["acceptance"], abs=0.1)
    page = (tmp_path / "report.html").read_text()
    assert "plain text as the first engine" in page
    assert "<td>100%" in page


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{file}", "--tasks", "nonsense"], 2, "no such task"),
        (["{file}", "--drafts", "2", "--slots", "0"], 2, "--slots"),
        (["{file}", "--mtp-types", "Q8_0"], 2, "--source"),
        (["{file}", "--engine", "ollama"], 2, "no such engine"),
        (["{file}", "--engine", "http://127.0.0.1:9"], 2, "--plain-engine"),
        (["{file}", "--engine", "http://127.0.0.1:9", "--plain-engine", "http://127.0.0.1:9"], 5, "cannot be reached"),
        (["{file}", "--engine", "torch", "--slots", "2"], 2, "one request at a time"),
        (["{trunk}"], 3, "no head"),
        (["{missing}"], 3, "missing.gguf"),
    ],
)
def test_what_cannot_be_measured(
    conversions, tmp_path: Path, capsys, arguments: list[str], code: int, words: str
) -> None:
    names = {
        "file": str(conversions("dense", "bundled") / "BF16.gguf"), "trunk": str(conversions("dense", "none") / "BF16.gguf"),
        "missing": str(tmp_path / "missing.gguf"),
    }  # fmt: skip
    found = bench_main([*(a.format(**names) for a in arguments), "-o", str(tmp_path / "out"), *SMALL])
    assert found == code
    assert words in capsys.readouterr().err


def test_a_file_that_does_not_run_is_a_failed_cell(conversions, tmp_path: Path, capsys) -> None:
    """The others are measured, and the failure is told."""
    good = conversions("dense", "bundled") / "BF16.gguf"
    broken = tmp_path / "broken.gguf"
    data = good.read_bytes()
    broken.write_bytes(data.replace(b"blk.2.attn_norm.weight", b"blk.2.attn_morn.weight"))
    code = bench_main([
        str(good), str(broken), "--tasks", "code", "--drafts", "1", "--runs", "1", "--no-costs", "-o", str(tmp_path / "out"),
        *SMALL,
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    assert "failed: llama.cpp, broken.gguf" in out
    assert "BF16.gguf, Q8_0" in out or "own head, n = 1, code" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{empty}"], 3, "no results"),
        (["{folder}", "--type", "Q2_K"], 3, "nothing like that"),
        (["{folder}", "--input-tokens", "5"], 2, "go together"),
    ],
)
def test_what_cannot_be_recommended(
    folder: Path, tmp_path: Path, capsys, arguments: list[str], code: int, words: str
) -> None:
    found = recommend_main([a.format(empty=tmp_path, folder=folder) for a in arguments])
    assert found == code
    assert words in capsys.readouterr().err


def test_bundled_prompts() -> None:
    """At least ten of each task, none twice."""
    prompts = [p for task in TASKS for p in measuring._paragraphs(task)]
    assert len(prompts) == len(set(prompts))
    assert all(len(measuring._paragraphs(task)) >= 10 for task in TASKS)
