"""Engines behind a URL: llama-server, and servers of OpenAI's completions that return token ids (vLLM, SGLang).

Which one it is, the server says itself (spec/runtime.md, sections 3 and 7). Counters are matched by the end of their
names, since prefixes differ and move; what a server does not report is None, not 0.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from converter.errors import EnvironmentFailure
from verify.engines.base import Completion, DraftCounts, Request, Run

_TIMEOUT_S = 600
_COUNTER = re.compile(r"^\S*spec_decode_num_(\w+?)(?:_total)?(?:\{([^}]*)\})?\s+([0-9.eE+-]+)", re.MULTILINE)


class Server:
    """A running server. Raises EnvironmentFailure where it cannot be reached, used, or understood."""

    def __init__(self, url: str, *, timeout: float = _TIMEOUT_S) -> None:
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self.model = ""
        self._complete = self._identify()

    def _identify(self) -> Any:
        """Which kind of server it is."""
        props = self._get_json("/props")
        if props and "build_info" in props:
            self.name = f"llama.cpp {props['build_info']}"
            return self._llama
        models = self._get_json("/v1/models")
        if not models or not models.get("data"):
            raise EnvironmentFailure(
                "no engine that is known answers there", found=self.url,
                expected="llama-server (/props), or a server with /v1/models", hint="check address and port",
            )  # fmt: skip
        self.model = models["data"][0]["id"]
        version = self._get_json("/version")
        if version and "version" in version:
            self.name = f"vLLM {version['version']}"
            return self._openai
        info = self._get_json("/server_info") or self._get_json("/get_server_info")
        if info and "version" in info:
            self.name = f"SGLang {info['version']}"
            return self._sglang
        self.name = str(models["data"][0].get("owned_by", "unknown engine"))
        return self._openai

    def complete(self, request: Request) -> Completion:
        return self._complete(request)

    def run(self, requests: Sequence[Request], slots: int = 1) -> Run:
        """All requests, `slots` of them at a time, and what the counters say of them together."""
        before = self.counts()
        started = time.monotonic()
        if slots == 1:
            answers = tuple(self.complete(request) for request in requests)
        else:
            with ThreadPoolExecutor(slots) as pool:
                answers = tuple(pool.map(self.complete, requests))
        seconds = time.monotonic() - started
        after = self.counts()
        counts = after - before if after is not None and before is not None else None
        return Run(answers, counts, self.name, seconds)

    def counts(self) -> DraftCounts | None:
        """Cumulative counters, None where the server keeps none (llama-server: --metrics)."""
        text = self._get("/metrics")
        return parse_counts(text.decode(errors="replace")) if text is not None else None

    def tokenize(self, text: str) -> list[int]:
        """Token ids by llama-server's tokenizer, special tokens recognised, none added."""
        return self._post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    # --- kinds

    def _llama(self, request: Request) -> Completion:
        greedy = request.temperature == 0
        body = {
            "prompt": list(request.prompt), "n_predict": request.tokens, "temperature": request.temperature,
            "top_k": 1 if greedy else 0, "seed": request.seed, "cache_prompt": False, "return_tokens": True,
            "ignore_eos": request.ignore_eos, "repeat_penalty": 1.0,
            "samplers": ["top_k", "temperature"] if greedy else ["temperature"],
            **({"n_probs": 2, "samplers": ["temperature"]} if request.margins else {}),
        }  # fmt: skip
        started = time.monotonic()
        answer = self._post("/completion", body)
        timings = answer["timings"]
        margins = [_margin(e["top_logprobs"]) for e in answer.get("completion_probabilities", [])]
        return Completion(
            tuple(answer["tokens"]), timings.get("draft_n", 0), timings.get("draft_n_accepted", 0),
            timings["predicted_per_second"], tuple(margins), timings["prompt_n"], timings["prompt_per_second"],
            time.monotonic() - started,
        )  # fmt: skip

    def _openai(self, request: Request) -> Completion:
        """By streaming, since these servers give no timings: the first piece ends the prompt."""
        body = {
            "model": self.model, "prompt": list(request.prompt), "max_tokens": request.tokens, "stream": True,
            "temperature": request.temperature, "seed": request.seed, "ignore_eos": request.ignore_eos,
            "return_token_ids": True, **({"logprobs": 2} if request.margins else {}),
        }  # fmt: skip
        tokens: list[int] = []
        margins: list[float] = []
        times = [time.monotonic()]
        first = 0
        for piece in self._stream("/v1/completions", body):
            if "error" in piece:
                raise EnvironmentFailure(
                    "the engine failed", found=f"{self.name}: {piece['error']}", hint="see its log"
                )
            for choice in piece.get("choices", []):
                ids = choice.get("token_ids")
                if ids is None and choice.get("text"):
                    raise EnvironmentFailure(
                        "the engine returns no token ids", found=self.name, expected="choices[0].token_ids",
                        hint="a build that knows return_token_ids",
                    )  # fmt: skip
                if ids:
                    tokens += ids
                    first = first or len(ids)
                    times.append(time.monotonic())
                margins += [_best_two(top) for top in (choice.get("logprobs") or {}).get("top_logprobs") or []]
        if not tokens:
            raise EnvironmentFailure("the engine answered without a token", found=self.name, hint="see its log")
        decoding = times[-1] - times[1]
        return Completion(
            tuple(tokens), None, None, (len(tokens) - first) / decoding if decoding > 0 else 0.0, tuple(margins),
            len(request.prompt), len(request.prompt) / (times[1] - times[0]), times[-1] - times[0],
        )  # fmt: skip

    def _sglang(self, request: Request) -> Completion:
        body = {
            "input_ids": list(request.prompt), "stream": False,
            "sampling_params": {
                "max_new_tokens": request.tokens, "temperature": request.temperature,
                "ignore_eos": request.ignore_eos,
            },
        }  # fmt: skip
        started = time.monotonic()
        self._post("/generate", {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 1}})
        prefilled = time.monotonic()
        answer = self._post("/generate", body)
        ended = time.monotonic()
        if "output_ids" not in answer:
            raise EnvironmentFailure("the engine returns no token ids", found=self.name, expected="output_ids")
        tokens, meta = answer["output_ids"], answer.get("meta_info", {})
        steps = meta.get("spec_verify_ct")
        decoding = max(ended - prefilled - (prefilled - started), 1e-9)
        return Completion(
            tuple(tokens), meta.get("spec_draft_token_num"), len(tokens) - steps if steps else None,
            (len(tokens) - 1) / decoding, (), len(request.prompt), len(request.prompt) / (prefilled - started),
            ended - prefilled,
        )  # fmt: skip

    # --- transport

    def _get(self, path: str) -> bytes | None:
        """None where the server has no such page."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=self.timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError:
            return None
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _get_json(self, path: str) -> dict[str, Any] | None:
        data = self._get(path)
        try:
            found = json.loads(data) if data is not None else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _open(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            words = error.read(500).decode(errors="replace")
            raise EnvironmentFailure(
                f"the engine refused a request to {path}", expected="200", found=f"{error.code} {words}"
            ) from error
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            with self._open(path, body) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events."""
        try:
            with self._open(path, body) as answer:
                for line in answer:
                    if line.startswith(b"data:") and b"[DONE]" not in line:
                        yield json.loads(line[5:])
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> EnvironmentFailure:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError) or "timed out" in str(reason):
            return EnvironmentFailure(
                "the engine does not answer", found=f"nothing from {self.url} for {self.timeout:g} s",
                hint="look at its log; fewer --tokens make shorter requests",
            )  # fmt: skip
        return EnvironmentFailure(
            "the engine cannot be reached", found=f"{self.url}: {reason}", hint="start it, or check address and port"
        )


def parse_counts(metrics: str) -> DraftCounts | None:
    """Counters of speculative decoding in Prometheus text, by the end of their names; None where there are none."""
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(metrics):
        if name.endswith("per_pos"):
            place = re.search(r'position="(\d+)"', labels)
            if place:
                positions[int(place[1])] = positions.get(int(place[1]), 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0) + int(float(value))
    if "draft_tokens" not in totals:
        return None
    by_position = tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1))
    counts = DraftCounts(totals.get("drafts", 0), totals["draft_tokens"], totals.get("accepted_tokens", 0), by_position)
    if counts.accepted > counts.drafted or any(later > earlier for earlier, later in pairwise(by_position)):
        raise EnvironmentFailure("the engine's counters are impossible", found=str(counts))
    return counts


def _margin(top: list[dict[str, Any]]) -> float:
    return top[0]["logprob"] - top[1]["logprob"] if len(top) > 1 else float("inf")


def _best_two(top: dict[str, float]) -> float:
    best = sorted(top.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")
