"""Level logits: how far the file's next-token distributions are from the source's, over a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from verify.models.base import TorchModel
from verify.results import Finding, LevelResult

Module = Callable[[Tensor], Tensor]  # token ids [rows] to logits [rows, vocabulary]
CHUNK = 256
# Largest plausible mean divergence in nats, by bits per weight of the trunk: far above what the types cost by themselves.
_LIMITS = ((15.0, 0.002), (8.0, 0.02), (6.0, 0.06), (5.0, 0.15), (4.0, 0.5), (3.0, 1.2), (0.0, 3.0))


# Of our own step from transformers' module on the same weights, mean divergence in nats, by the dtype of our step.
_OWN_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def check_logits(
    engine: TorchModel, reference: TorchModel, tokens: Sequence[int], bits: float, module: Module | None = None,
    first: Sequence[int] = (),
) -> LevelResult:  # fmt: skip
    """Both models over the same tokens, in chunks from an empty state. bits: per weight of the file's trunk.

    first: what stands before every chunk, the begin token of models that want one.
    module: transformers' logits for the weights of the file, which our own must equal but for rounding.
    """
    divergences: list[Tensor] = []
    same = total = 0
    loss = {"file": 0.0, "source": 0.0}
    for ids in _chunks(tokens, first, engine.device):
        mine, theirs = (m.logits(m.trunk(ids, m.trunk_state(len(ids)), keep_rows=False)) for m in (engine, reference))
        if not torch.isfinite(mine).all():
            return LevelResult("logits", "the file gives no finite logits", [Finding("logits are not finite")])
        mine, theirs = mine.log_softmax(-1), theirs.to(mine.device).log_softmax(-1)
        divergences.append((theirs.exp() * (theirs - mine)).sum(-1).cpu())
        same += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
        total += len(ids)
        for name, logs in (("file", mine), ("source", theirs)):
            loss[name] -= float(logs[:-1].gather(1, ids[1:, None]).double().sum())
    if not divergences:
        return LevelResult("logits", "the text is too short", skipped=True)
    all_of_them = torch.cat(divergences).double().clamp(min=0)
    pairs = total - len(divergences)
    perplexity = {name: math.exp(value / pairs) for name, value in loss.items()}
    mean = all_of_them.mean().item()
    data = {
        "tokens": total, "kld_mean": mean, "kld_median": all_of_them.median().item(),
        "kld_999": all_of_them.quantile(0.999).item(), "kld_max": all_of_them.max().item(), "top1": same / total,
        "perplexity": perplexity["file"], "perplexity_source": perplexity["source"], "bits_per_weight": bits,
    }  # fmt: skip
    limit = next(most for least, most in _LIMITS if bits >= least)
    findings = []
    if not mean <= limit:
        findings.append(
            Finding(
                "far from the source's distributions",
                "mean KL divergence",
                f"at most {limit:g} nats at {bits:.1f} bits per weight",
                f"{mean:.3g}",
            )
        )
    if module is not None:
        ids = next(_chunks(tokens, first, engine.device))
        ours = engine.logits(engine.trunk(ids, engine.trunk_state(len(ids)), keep_rows=False)).log_softmax(-1).cpu()
        theirs = module(ids.cpu()).log_softmax(-1)
        own = (theirs.exp() * (theirs - ours)).sum(-1).mean().item()
        data["kld_from_transformers"] = own
        if not own <= _OWN_LIMITS[engine.dtype]:
            findings.append(
                Finding(
                    "transformers' own module gives other logits for these weights", "mean KL divergence",
                    f"at most {_OWN_LIMITS[engine.dtype]:g} nats", f"{own:.3g}",
                    "metadata that does not describe the model that the source's config does",
                )
            )  # fmt: skip
    summary = (
        f"KL divergence {mean:.2g} nats mean, {data['kld_999']:.2g} at 99.9 %; top-1 agreement {same / total:.2%}; "
        f"perplexity {perplexity['file']:.3f}, source {perplexity['source']:.3f} ({total} tokens)"
    )
    if "kld_from_transformers" in data:
        summary += f"; from transformers' module on these weights {data['kld_from_transformers']:.2g}"
    return LevelResult("logits", summary, findings, data)


def _chunks(tokens: Sequence[int], first: Sequence[int], device: torch.device) -> Iterator[Tensor]:
    size = CHUNK - len(first)
    for at in range(0, len(tokens) - 1, size):
        yield torch.tensor([*first, *tokens[at : at + size]], device=device)
