"""The model card: README.md as the Hub shows it, from figures alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.policy import Recommendation, options
from converter.console import amount
from converter.files import read_text
from converter.plan import DRAFTER
from release.facts import Facts, FileFacts, draft_words, machine
from release.make import HEADS
from release.plots import Plot

_TAGS = ("gguf", "llama.cpp", "mtp", "multi-token-prediction", "speculative-decoding")
_IN_VLLM = ("qwen35", "qwen35moe", "qwen3next")  # with the head of the source checkpoint (spec/runtime.md, section 7)
_USUAL = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q8_0")  # types that commands show, the first that is there
_DRAFTS_TO_TRY = 3
_VERDICTS = {"passed": "identical", "inconclusive": "identical but for near-ties", "failed": "failed"}
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")  # of generation_config.json, in a Modelfile
_OLLAMA_NAMES = {"repetition_penalty": "repeat_penalty"}


def card(facts: Facts, plots: Sequence[Plot]) -> str:
    """The whole file."""
    sections = [
        _introduction(facts), _files(facts), _recommended(facts), _plots(plots), _run(facts), _verified(facts),
        _provenance(facts), _notes(facts),
    ]  # fmt: skip
    return _front_matter(facts) + "\n" + "\n\n".join(s for s in sections if s) + "\n"


def _front_matter(facts: Facts) -> str:
    from huggingface_hub import ModelCardData

    own, source = facts.recipe.card, facts.origin.card
    weighted = ("imatrix",) if facts.recipe.files.imatrix else ()
    extra: dict[str, Any] = {"quantized_by": own.author} if own.author else {}
    for name in ("license_name", "license_link"):
        if source.get(name) and not own.license:
            extra[name] = source[name]
    data = ModelCardData(
        license=own.license or source.get("license"), base_model=facts.base_model,
        base_model_relation="quantized" if facts.base_model else None, library_name="gguf",
        pipeline_tag="text-generation",  # of text alone, also where the source sees images
        language=list(own.languages) or source.get("language"), tags=list(dict.fromkeys([*_TAGS, *weighted, *own.tags])),
        **extra,
    )  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n"


def _introduction(facts: Facts) -> str:
    own = facts.recipe.card.introduction
    source = (
        f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else facts.origin.name
    )
    what = "its drafter" if facts.drafter else "its multi-token-prediction (MTP) head"
    words = (
        f"# {facts.names.base} with MTP, GGUF\n\n"
        f"{source} with {what}, for llama.cpp. {'The drafter' if facts.drafter else 'The head'} guesses the next tokens, the model checks all guesses in one pass "
        "and keeps those it would have chosen itself: the same text, faster where guesses are good."
    )
    return f"{words}\n\n{read_text(facts.recipe.path(own)).strip()}" if own else words


# --- tables


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    left = ("File", "Task", "Type", "Verdict", "Drafts", "Level", "Draft")
    marks = ["---" if h in left else "--:" for h in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, marks, *rows))


def _files(facts: Facts) -> str:
    parts = ["## Files"]
    if bundled := facts.of_kind("bundled"):
        parts.append(
            "**Bundled**: trunk and head in one file. Take one of these for llama.cpp and LM Studio; no other file."
        )
        parts.append(_runnable(bundled))
    if trunks := facts.of_kind("trunk"):
        head = f"`{facts.sidecar.file.name}`" if facts.sidecar else ""
        if bundled:
            pair = f"; with {head} as sidecar they draft too" if head else ""
            parts.append(f"**Trunk only**: for engines that do not know heads{pair}.")
        else:
            parts.append("**Model**" + (f": drafts with {head} beside it." if head else ": does not draft by itself."))
        parts.append(_runnable(trunks))
    if heads := facts.of_kind(*HEADS):
        if heads[0].file.kind == DRAFTER:
            parts.append("**Drafter**, for the files above.")
        else:
            parts.append(
                "**Sidecars**: the head alone, for the trunk-only files above, never for a bundled one. They hold copies of "
                "embedding and output."
            )
        rows = [
            (_link(f), amount(f.file.size), f"{f.file.bits_per_weight:.2f}", f.accepted, _VERDICTS[f.verdict])
            for f in heads
        ]
        parts.append(_table(("File", "Size", "Bits/weight", "Accepted at draft 1, 2, …", "Verdict"), rows))
    parts.append(_legend(facts))
    return "\n\n".join(parts)


def _runnable(files: Sequence[FileFacts]) -> str:
    header = ("File", "Size", "Bits/weight", "KL divergence", "Top-1", "Perplexity", "Accepted at draft 1, 2, …", "Verdict",
              "Drafts")  # fmt: skip
    rows = []
    for f in files:
        d = f.level("logits")
        figures = (
            (f"{max(0, d['kld_mean']):.2g}", f"{d['top1']:.1%}", f"{d['perplexity']:.3f}") if d else ("–", "–", "–")
        )
        rows.append((
            _link(f), amount(f.file.size), f"{f.file.bits_per_weight:.2f}", *figures, f.accepted, _VERDICTS[f.verdict],
            draft_words(f.draft),
        ))  # fmt: skip
    return _table(header, rows)


def _link(facts: FileFacts) -> str:
    count = len(facts.file.parts)
    more = f" … {count} parts" if count > 1 else ""
    return f"[{facts.file.stem}]({facts.file.first}){more}"


def _legend(facts: Facts) -> str:
    logits = next((d for f in facts.published if (d := f.level("logits"))), None)
    words = []
    if logits:
        words.append(
            f"KL divergence (mean, nats), top-1 agreement and perplexity are against the source's distributions over "
            f"{logits['tokens']:,} tokens, of which the source's own perplexity is {logits['perplexity_source']:.3f}."
        )
    source = next((f.acceptance_of_source for f in facts.published if f.acceptance_of_source), None)
    if source:
        words.append(f"Of the source's own head {', '.join(f'{s:.0%}' for s in source)} are accepted.")
    if facts.measured:
        words.append(
            f"*Drafts* is what was fastest over {', '.join(facts.measured.tasks)} in {facts.engine} on {machine()}; off where "
            "plain decoding was. Other machines and texts differ: 1 to 4 are worth trying."
        )
    return " ".join(words)


def _recommended(facts: Facts) -> str:
    if facts.measured is None:
        return ""
    tasks = list(facts.measured.tasks)
    files = [f for f in facts.published if f.file in facts.measured.files.values()]
    rows = [(f.file.type, *(draft_words(f.drafts.get(task)) for task in tasks)) for f in files]
    words = "Drafts by task, with the speedup over plain decoding that was measured; off where there is none."
    return f"## Drafts by task\n\n{words}\n\n{_table(('Type', *tasks), rows)}"


def _plots(plots: Sequence[Plot]) -> str:
    return "\n\n".join(f"![{plot.words}](plots/{plot.name}.png)" for plot in plots)


# --- commands


def _usual(files: Sequence[FileFacts]) -> FileFacts | None:
    by_type = {f.file.type: f for f in files}
    return next((by_type[t] for t in _USUAL if t in by_type), files[0] if files else None)


def _flags(found: Recommendation | None) -> str:
    if found is not None and found.best is not None and found.on:
        return options(found.best.load)
    return f"--spec-type draft-mtp --spec-draft-n-max {_DRAFTS_TO_TRY}"


def _run(facts: Facts) -> str:
    bundled, trunk = _usual(facts.of_kind("bundled")), _usual(facts.of_kind("trunk"))
    parts = ["## Run"]
    parts += [
        *_llama_cpp(facts, bundled, trunk),
        *_lm_studio(facts, bundled),
        *_ollama(facts, trunk, bundled),
        *_vllm(facts),
    ]
    return "\n\n".join(parts)


def _block(*lines: str, language: str = "sh") -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _llama_cpp(facts: Facts, bundled: FileFacts | None, trunk: FileFacts | None) -> Iterator[str]:
    repository = facts.repository
    yield "### llama.cpp"
    chosen = bundled or trunk
    if chosen is not None and chosen.draft is not None and not chosen.draft.on:
        yield (
            f"Where this was measured, plain decoding of {chosen.file.type} was fastest: leave the `--spec` options out, or "
            "measure on your machine."
        )
    if bundled is not None:
        flags = _flags(bundled.draft)
        lines = [f"llama-server -m {bundled.file.first} {flags}"]
        if repository:
            lines = [
                f"llama-server -hf {repository} -hff {bundled.file.first} {flags}",
                "# or, of files that are here:",
                *lines,
            ]
        yield _block(*lines)
    if trunk is not None and facts.sidecar is not None:
        if bundled is not None:
            yield "Or trunk and sidecar:"
        fetch = [
            f"hf download {repository} {' '.join(trunk.file.parts)} {facts.sidecar.file.first} --local-dir ."
        ] if repository else []  # fmt: skip
        run = f"llama-server -m {trunk.file.first} -md {facts.sidecar.file.first} {_flags(trunk.draft)}"
        yield _block(*fetch, run)
    yield (
        f"Tested with {facts.engine}: every file was loaded in it and decoded. Builds before draft-mtp (spring 2026) take the "
        "trunk-only files; those before June 2026 feed heads other states and accept less."
    )


def _lm_studio(facts: Facts, bundled: FileFacts | None) -> Iterator[str]:
    yield "### LM Studio"
    if bundled is None:
        yield "Load a trunk-only file. MTP in LM Studio needs a bundled head, which this model does not have."
        return
    if facts.repository:
        yield _block(
            f"lms get https://huggingface.co/{facts.repository}",
            f"lms load {bundled.file.stem} --speculative-draft-mtp",
        )
    else:
        yield _block(f"lms load {bundled.file.stem} --speculative-draft-mtp")
    yield "LM Studio drafts with bundled heads only: take a bundled file, and no sidecar. Not tested here."


def _ollama(facts: Facts, trunk: FileFacts | None, bundled: FileFacts | None) -> Iterator[str]:
    chosen = trunk or bundled
    if chosen is None:
        return
    yield "### ollama"
    whole = chosen.file.first
    if len(chosen.file.parts) > 1:
        whole = f"{chosen.file.stem}.gguf"
        yield "ollama takes no files in parts; join them first:"
        yield _block(f"convert-mtp {chosen.file.first} {whole}")
    yield "`Modelfile`:"
    yield _block(f"FROM ./{whole}", *_parameters(facts), language="dockerfile")
    name = facts.names.base.lower()
    yield _block(f"ollama create {name} -f Modelfile && ollama run {name}")
    why = "Some versions refuse bundled files, so this is the trunk alone: " if trunk else ""
    yield f"{why}{'t' if why else 'T'}ext is the same, without drafts. Not tested here."


def _parameters(facts: Facts) -> list[str]:
    """Sampling as the source recommends it."""
    file = facts.origin.folder / "generation_config.json"
    if not file.is_file():
        return []
    found: Mapping[str, Any] = json.loads(read_text(file))
    values = {_OLLAMA_NAMES.get(k, k): v for k, v in found.items()}
    return [f"PARAMETER {name} {values[name]:g}" for name in _PARAMETERS if isinstance(values.get(name), int | float)]


def _vllm(facts: Facts) -> Iterator[str]:
    """Of the source checkpoint: vLLM does not take heads from GGUF files."""
    if facts.architecture not in _IN_VLLM or facts.base_model is None:
        return
    chosen = _usual(facts.published)
    drafts = chosen.draft.drafts if chosen and chosen.draft and chosen.draft.on else 2
    config = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
    yield "### vLLM"
    yield _block(f"vllm serve {facts.base_model} --speculative-config '{config}'")
    yield "This is the source checkpoint with its own head: vLLM takes no heads from GGUF files. Not tested here."


# --- the rest


def _verified(facts: Facts) -> str:
    files = facts.recipe.files
    by = " by the importance matrix" if files.imatrix or files.mtp_imatrix else ""
    words = {
        "structure": "header, metadata, names and shapes are those of the source's conversion",
        "fidelity": f"every tensor has the bytes that the source gives{by}",
        "logits": "next-token distributions are as near to the source's as the type allows",
        "identity": "decoding with drafts gives the tokens of plain decoding, and every bit of its logits",
        "acceptance": "the head guesses as well as the source's own",
        "engine": f"{facts.engine} loads it and gives the same tokens with drafts as without",
    }
    rows = [(level, words[level]) for level in facts.levels]
    missing = [level for level in words if level not in facts.levels]
    parts = [
        "## Verified",
        "Every file here passed:",
        _table(("Level", "Draft"), rows).replace("| Draft |", "| what holds |"),
    ]
    if missing:
        parts.append(f"Not run for this release: {', '.join(missing)}.")
    ties = [f for f in facts.published if f.verdict == "inconclusive"]
    if ties:
        names = ", ".join(f"`{f.file.stem}`" for f in ties)
        parts.append(
            f"Near-ties: in {names} a text with drafts left the plain one at a token where the two best were nearly equal, "
            "which the engine's rounding decides. Details are in report.html."
        )
    return "\n\n".join(parts)


def _provenance(facts: Facts) -> str:
    origin = facts.origin
    revision = f" at revision `{origin.revision}`" if origin.revision else ""
    drafter = f" and {facts.drafter.name}" if facts.drafter else ""
    who = f" by {facts.recipe.card.author}" if facts.recipe.card.author else ""
    return (
        f"## Provenance\n\nMade{who} with {facts.program} from {origin.name}{revision}{drafter}. `provenance.json` has the "
        "SHA-256 of every source file, the options and the type of every tensor; each file says the same in its metadata "
        "(`mtp.*`). `results.json` has all figures, `report.html` shows them.\n\n"
        + _block("sha256sum -c SHA256SUMS")
    )  # fmt: skip


def _notes(facts: Facts) -> str:
    notes = list(facts.notes)
    if any("vision" in n for n in notes):
        notes.append("drafting after images was not tested")
    if facts.refused:
        names = ", ".join(f.file.stem for f in facts.refused)
        notes.append(f"made, but not published because verification failed: {names}")
    return "## Notes\n\n" + "\n".join(f"- {n}" for n in notes) if notes else ""
