"""Every file verified: by itself, and with the file that it drafts for or that drafts for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from converter.errors import EnvironmentFailure
from release.ledger import Ledger, digest
from release.make import HEADS, ReleaseFile
from release.origin import Origin, file_sha256
from release.recipe import Checks, Recipe
from verify.check import LLAMA_CPP, Options, torch_is_here, verify
from verify.results import LEVELS, Verdict

_OF_FILE = ("structure", "fidelity", "logits")
_OF_TRUNK = ("logits",)
_OF_PAIR = ("identity", "acceptance", "engine")
_IN_TORCH = ("logits", "identity", "acceptance")
ENGINE = "engine"
_ALWAYS = ("structure", ENGINE)
Notify = Callable[[str], None]


@dataclass
class Assessment:
    """What verification says of a file.

    reports: as verify-mtp's JSON, by what was verified. twin: of a bundled file with the same trunk, whose logits are
    therefore this one's. untried: why not everything was tried.
    """

    file: ReleaseFile
    reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    twin: Assessment | None = None
    untried: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst."""
        return max((Verdict[r["verdict"].upper()] for r in self.reports.values()), default=Verdict.INCONCLUSIVE)

    def levels(self) -> Iterator[Mapping[str, Any]]:
        return (level for report in self.reports.values() for level in report["levels"])

    def level(self, name: str) -> Mapping[str, Any] | None:
        """The last that was not skipped: of a trunk-only file the one with its sidecar."""
        found = [x for x in self.levels() if x["level"] == name and x["verdict"] != "skipped"]
        if not found and self.twin is not None and name in _OF_TRUNK:
            return self.twin.level(name)
        return found[-1] if found else None

    def reasons(self) -> list[str]:
        """What is wrong, or was not clear."""
        untried = [self.untried] if self.untried else []
        return untried + [
            f"{level['level']}: {_words(finding)}"
            for level in self.levels()
            for finding in level["findings"]
            if finding["verdict"] in {"failed", "inconclusive"}
        ]

    def passes(self, checks: Checks) -> bool:
        """Whether it may be published."""
        if self.verdict is Verdict.INCONCLUSIVE and checks.near_ties == "refuse":
            return False
        return self.verdict is not Verdict.FAILED and not self.untried


def _words(finding: Mapping[str, Any]) -> str:
    where = f"{finding['where']}: " if finding["where"] else ""
    parts = [f"{where}{finding['what']}"]
    parts += [f"{name} {finding[name]}" for name in ("expected", "found") if finding[name]]
    return "; ".join(parts) + (f" (likeliest cause: {finding['cause']})" if finding["cause"] else "")


def levels_of(checks: Checks) -> tuple[str, ...]:
    """The levels that are run: those asked for, or all that this machine can; structure and engine always.

    Raises EnvironmentFailure where what is needed is not installed.
    """
    try:
        version("xllamacpp")
    except PackageNotFoundError as error:
        raise EnvironmentFailure(
            "every file is loaded in llama.cpp before it is published, and that is not installed",
            hint="pip install 'convert-mtp[llamacpp]'",
        ) from error
    if checks.levels:
        missing = [] if torch_is_here() else [x for x in checks.levels if x in _IN_TORCH]
        if missing:
            raise EnvironmentFailure(
                "torch is not installed", expected=f"for the recipe's levels {', '.join(missing)}",
                hint="pip install 'convert-mtp[verify]', or other verify.levels",
            )  # fmt: skip
        return tuple(x for x in LEVELS if x in {*checks.levels, *_ALWAYS})
    return tuple(x for x in LEVELS if torch_is_here() or x not in _IN_TORCH)


@dataclass
class Verifier:
    """Verifies files where they lie.

    levels: to run. imatrix, mtp_imatrix: by what files are weighted. find: the folder that holds a file now.
    """

    origin: Origin
    drafter: Origin | None
    recipe: Recipe
    levels: Sequence[str]
    imatrix: Path | None
    mtp_imatrix: Path | None
    ledger: Ledger
    find: Callable[[ReleaseFile], Path]
    notify: Notify

    def all(self, files: Sequence[ReleaseFile]) -> list[Assessment]:
        """Bundled files are tried alone; trunk-only files and sidecars that are sound by themselves with each other.

        First every sidecar with one trunk, then every trunk with one good sidecar: a bad one takes no other with it.
        """
        found = {f.name: Assessment(f) for f in files}
        bundled = [f for f in files if f.kind == "bundled"]
        for file in [*bundled, *(f for f in files if f.kind != "bundled")]:
            mine = found[file.name]
            twins = [found[b.name] for b in bundled if file.kind == "trunk" and _same_trunk(b, file)]
            mine.twin = next((t for t in twins if self._is_good(t)), None)
            self._add(mine, None, [x for x in self.levels if self._alone(x, mine)])
        pair = [x for x in self.levels if x in _OF_PAIR]
        trunks = [f for f in files if f.kind == "trunk" and self._is_good(found[f.name])]
        heads = [f for f in files if f.kind in HEADS and self._is_good(found[f.name])]
        for head in heads:
            if trunks:
                self._add(found[head.name], largest(trunks), pair)
            else:
                found[head.name].untried = "there is no sound trunk-only file to draft for"
        heads = [h for h in heads if self._is_good(found[h.name])]
        for trunk in trunks if heads else []:
            self._add(found[trunk.name], default_head(heads), pair)
        return list(found.values())

    def _alone(self, level: str, found: Assessment) -> bool:
        """Whether a level is run on a file by itself."""
        kind = found.file.kind
        if kind == "bundled":
            return True
        if kind in HEADS:
            return level in {"structure", "fidelity"}
        return level in {*_OF_FILE, ENGINE} and not (found.twin is not None and level in _OF_TRUNK)

    def _is_good(self, found: Assessment) -> bool:
        return found.passes(self.recipe.verify)

    def _add(self, to: Assessment, partner: ReleaseFile | None, levels: Sequence[str]) -> None:
        """Verify a file, alone or with another, unless that was done with these very bytes and options."""
        file = to.file
        what = f"{file.stem} with {partner.stem}" if partner else file.stem
        key = digest(self._sums(file), self._sums(partner) if partner else None, levels, self._settings(), _versions())
        report = self.ledger.get("checks", what, key)
        if report is None:
            report = self._verify(file, partner, levels, what)
            self.ledger.put("checks", what, key, report)
        to.reports[what] = report

    def _verify(
        self, file: ReleaseFile, partner: ReleaseFile | None, levels: Sequence[str], what: str
    ) -> Mapping[str, Any]:
        checks, path = self.recipe.verify, self.recipe.path
        trunk, head = (partner, file) if partner and file.kind in HEADS else (file, partner)
        assert trunk is not None
        is_drafter = trunk.kind == "drafter"
        options = Options(
            source=self.drafter.folder if is_drafter and self.drafter else self.origin.folder,
            sidecar=self._path(head) if head else None,
            assistant=self.drafter.folder if self.drafter and not is_drafter else None,
            levels=levels, device=checks.device, drafts=checks.drafts, temperatures=checks.temperatures,
            prompts=path(checks.prompts) if checks.prompts else None, text=path(checks.text) if checks.text else None,
            tokens=checks.tokens, text_tokens=checks.text_tokens, engine=LLAMA_CPP,
            imatrix=self.imatrix, mtp_imatrix=self.mtp_imatrix,
        )  # fmt: skip
        report = verify(self._path(trunk), options, lambda level: self.notify(f"{what}: {level}"))
        return report.as_json()

    def _path(self, file: ReleaseFile) -> Path:
        return self.find(file) / file.first

    def _sums(self, file: ReleaseFile) -> list[str]:
        return [file_sha256(self.find(file) / part, self.ledger) for part in file.parts]

    def _settings(self) -> Any:
        """Everything of the recipe that decides a report."""
        checks = self.recipe.verify
        texts = [file_sha256(self.recipe.path(p), self.ledger) if p else None for p in (checks.prompts, checks.text)]
        sources = [self.origin.files, self.drafter.files if self.drafter else None]
        return [checks.drafts, checks.temperatures, checks.tokens, checks.text_tokens, checks.device, texts, sources]


def _same_trunk(bundled: ReleaseFile, trunk: ReleaseFile) -> bool:
    """Whether every tensor of a trunk-only file is in a bundled one, in the same type: of one source the same bytes."""
    return all(bundled.tensors.get(name) == tensor for name, tensor in trunk.tensors.items())


def default_head(heads: Sequence[ReleaseFile]) -> ReleaseFile:
    """The sidecar that trunks are used with where nothing else is said: Q8_0, else the first."""
    return next((h for h in heads if h.type == "Q8_0"), heads[0])


def largest(trunks: Sequence[ReleaseFile]) -> ReleaseFile:
    return max(trunks, key=lambda f: f.size)


def _versions() -> dict[str, str]:
    """Of everything whose results are kept."""
    found = {}
    for package in ("convert-mtp", "torch", "transformers", "tokenizers", "xllamacpp"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
