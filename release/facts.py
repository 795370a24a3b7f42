"""What is known of every file of a release, and of the release as a whole: what cards, pages and results tell."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.policy import Recommendation
from release.check import Assessment, default_head
from release.make import HEADS, ReleaseFile
from release.measure import Measured
from release.names import Names
from release.origin import Origin
from release.recipe import Recipe

SCHEMA = 1


@dataclass
class FileFacts:
    """One file. published: it passed. sha256: of its parts, by path. draft: what to do with it, None if not measured."""

    file: ReleaseFile
    assessment: Assessment
    published: bool
    sha256: Mapping[str, str]
    draft: Recommendation | None = None
    drafts: Mapping[str, Recommendation] = field(default_factory=dict)  # by task

    def level(self, name: str) -> Mapping[str, Any]:
        """A level's data; empty where it was not run."""
        found = self.assessment.level(name)
        return found["data"] if found else {}

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts accepted, by position: cumulative."""
        return [a / d if d else 0.0 for a, d in self.level("acceptance").get("file", [])]

    @property
    def acceptance_of_source(self) -> list[float]:
        return [a / d if d else 0.0 for a, d in self.level("acceptance").get("source") or []]

    @property
    def accepted(self) -> str:
        """In words: by position in torch, else of all drafts in the engine."""
        if self.acceptance:
            return ", ".join(f"{s:.0%}" for s in self.acceptance)
        runs = [r for r in self.level("engine").get("runs", []) if r["drafted"]]
        longest = max(runs, key=lambda r: r["drafted"], default=None)
        return f"{longest['accepted'] / longest['drafted']:.0%} of all, {longest['run']}" if longest else "–"

    @property
    def verdict(self) -> str:
        return "failed" if self.assessment.untried else self.assessment.verdict.name.lower()

    def as_json(self) -> dict[str, Any]:
        file, logits = self.file, self.level("logits")
        figures = {k: logits.get(k) for k in ("kld_mean", "kld_median", "kld_999", "kld_max", "top1", "perplexity",
                                              "perplexity_source", "tokens")}  # fmt: skip
        return {
            "file": file.name, "kind": file.kind, "type": file.type, "mtp_type": file.head, "bytes": file.size,
            "bits_per_weight": round(file.bits_per_weight, 4), "sha256": dict(self.sha256), "published": self.published,
            "verdict": self.verdict, "reasons": self.assessment.reasons(), **figures,
            "acceptance": self.acceptance, "acceptance_of_source": self.acceptance_of_source,
            "levels": [
                {"of": of, **{k: level[k] for k in ("level", "verdict", "summary", "findings", "seconds")}}
                for of, report in self.assessment.reports.items()
                for level in report["levels"]
            ],
            "engine": self.level("engine").get("engine"),
            "recommended": self.draft.as_json() if self.draft else None,
            "recommended_by_task": {task: r.as_json() for task, r in self.drafts.items()},
        }  # fmt: skip


@dataclass
class Facts:
    """All of a release."""

    origin: Origin
    drafter: Origin | None
    recipe: Recipe
    names: Names
    architecture: str
    files: Sequence[FileFacts]
    measured: Measured | None
    notes: Sequence[str]
    levels: Sequence[str]
    program: str

    @property
    def published(self) -> list[FileFacts]:
        return [f for f in self.files if f.published]

    @property
    def refused(self) -> list[FileFacts]:
        return [f for f in self.files if not f.published]

    def of_kind(self, *kinds: str) -> list[FileFacts]:
        """Published ones."""
        return [f for f in self.published if f.file.kind in kinds]

    @property
    def sidecar(self) -> FileFacts | None:
        """The one that trunk-only files are used with."""
        heads = self.of_kind(*HEADS)
        if not heads:
            return None
        chosen = default_head([h.file for h in heads])
        return next(h for h in heads if h.file is chosen)

    @property
    def engine(self) -> str:
        """The build of llama.cpp that every file was loaded in."""
        return next((e for f in self.files if (e := f.level("engine").get("engine"))), "llama.cpp")

    @property
    def repository(self) -> str | None:
        return self.recipe.card.repository

    @property
    def base_model(self) -> str | None:
        return self.recipe.card.base_model or self.origin.repository

    def provenance(self) -> dict[str, Any]:
        """Where everything comes from; the files' own metadata say the same."""
        sources = {"model": _source(self.origin)} | ({"assistant": _source(self.drafter)} if self.drafter else {})
        return {
            "schema": SCHEMA, "program": self.program, "sources": sources, "recipe": recipe_json(self.recipe),
            "files": {
                f.file.name: {
                    "kind": f.file.kind, "type": f.file.type, "mtp_type": f.file.head, "sha256": dict(f.sha256),
                    "tensor_types": {name: kind for name, (kind, _) in f.file.tensors.items()},
                }
                for f in self.published
            },
        }  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        bench = self.measured.report.as_json() if self.measured else None
        return {
            "schema": SCHEMA, "name": self.names.base, "architecture": self.architecture, "program": self.program,
            "engine": self.engine, "machine": machine(), "levels": list(self.levels), "notes": list(self.notes),
            "files": [f.as_json() for f in self.files], "bench": bench,
        }  # fmt: skip


def draft_words(found: Recommendation | None) -> str:
    """What to do with drafts."""
    if found is None:
        return "not measured"
    return f"n = {found.drafts}, {found.expected:.2f}x" if found.on else "off"


def _source(origin: Origin) -> dict[str, Any]:
    return {"name": origin.name, "revision": origin.revision, "sha256": dict(origin.files)}


_PATHS = ("assistant", "imatrix", "mtp_imatrix", "prompts", "text", "introduction")


def recipe_json(recipe: Recipe) -> dict[str, Any]:
    """Without where it, and what it names, lie on this machine."""
    values = {k: v for k, v in asdict(recipe).items() if k != "file"}
    for section in (values, *(v for v in values.values() if isinstance(v, dict))):
        for name in _PATHS:
            if isinstance(path := section.get(name), str) and Path(path).is_absolute():
                section[name] = Path(path).name
    return values


def machine() -> str:
    """Processor and system that speeds were measured on."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {platform.system()}"
