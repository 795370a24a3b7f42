"""Engines behind a URL: the real llama-server, and servers that speak as vLLM and SGLang do, or do not work."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from converter.errors import EnvironmentFailure
from tests.conftest import EXAMPLE
from tests.oracles.transformers_model import prompt_ids
from verify.cli import main
from verify.engines.base import DraftCounts, Request
from verify.engines.http import Server, parse_counts
from verify.engines.llama_cpp import Engine, complete

SERVE = """
import sys, time
from verify.engines.llama_cpp import Engine, start
server = start(Engine(sys.argv[1], drafts=int(sys.argv[2]), slots=int(sys.argv[3])))
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def llama_server(file: Path, drafts: int, slots: int = 1) -> Iterator[str]:
    """A real server of its own; gives its address."""
    command = [sys.executable, "-c", SERVE, str(file), str(drafts), str(slots)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout
        yield next(line.strip() for line in child.stdout if line.startswith("http"))
        child.kill()


@pytest.fixture(scope="module")
def servers(conversions) -> Iterator[tuple[str, str, Path]]:
    """One with three drafts, one plain, and their file."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    file = conversions("dense", "bundled") / "BF16.gguf"
    with llama_server(file, 3) as drafting, llama_server(file, 0) as plain:
        yield drafting, plain, file


def test_llama_server(servers) -> None:
    """Same tokens as in process; counters by position; build and speeds are told."""
    drafting, plain, file = servers
    prompts = prompt_ids(EXAMPLE)[:3]
    requests = [Request(tuple(p), 32) for p in prompts]
    found = Server(drafting).run(requests)
    assert [c.tokens for c in found.completions] == [c.tokens for c in complete(Engine(str(file)), prompts, 32)]
    assert found.engine.startswith("llama.cpp b")
    assert found.counts
    assert found.counts.accepted == sum(c.accepted or 0 for c in found.completions) == sum(found.counts.by_position)
    assert found.counts.drafted == sum(c.drafted or 0 for c in found.completions)
    assert all(c.tokens_per_s > 0 and c.prompt_per_s > 0 and c.seconds > 0 for c in found.completions)
    assert Server(plain + "/v1/").run(requests).drafted in {0, None}


def test_several_slots_give_the_same_tokens(servers, conversions) -> None:
    """Four requests, two at a time."""
    requests = [Request(tuple(p), 24) for p in prompt_ids(EXAMPLE)[:4]]
    alone = Server(servers[0]).run(requests)
    with llama_server(conversions("dense", "bundled") / "BF16.gguf", 3, slots=2) as address:
        together = Server(address).run(requests, slots=2)
    assert [c.tokens for c in together.completions] == [c.tokens for c in alone.completions]


def test_the_command_with_two_servers(servers, capsys, tmp_path: Path) -> None:
    drafting, plain, file = servers
    code = main([
        str(file), "--level", "engine", "--engine", drafting, "--plain-engine", plain, "--tokens", "16", "--json",
        "--quiet", "--report", str(tmp_path),
    ])  # fmt: skip
    level = json.loads(capsys.readouterr().out)["levels"][0]
    assert code == 0, level
    assert level["data"]["runs"][0]["accepted"] > 0
    assert drafting in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("engine", "plain", "code", "words"),
    [
        ("{drafting}", None, 2, "--plain-engine"),
        ("llamacpp", "{plain}", 2, "no such engine"),
        ("{plain}", "{plain}", 5, "MTP is not active"),
        ("{drafting}", "{drafting}", 5, "without MTP"),
        ("{drafting}", "http://127.0.0.1:9", 5, "cannot be reached"),
        ("http://127.0.0.1:9", "{plain}", 5, "check address and port"),
        ("http://[", "{plain}", 5, "cannot be reached"),
    ],
)
def test_servers_that_cannot_be_used(servers, capsys, engine: str, plain: str | None, code: int, words: str) -> None:
    names = {"drafting": servers[0], "plain": servers[1]}
    arguments = [str(servers[2]), "--level", "engine", "--tokens", "8", "--quiet", "--engine", engine.format(**names)]
    if plain:
        arguments += ["--plain-engine", plain.format(**names)]
    assert main(arguments) == code
    assert words in capsys.readouterr().err


# --- servers of other kinds

Pages = dict[str, Callable[[dict[str, Any]], Any]]


@contextlib.contextmanager
def fake(pages: Pages) -> Iterator[str]:
    """A server of these pages: a dict is sent as JSON, text as it is, a list as a stream of events; all others are 404."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, body: dict[str, Any]) -> None:
            page = pages.get(self.path)
            found = page(body) if page else None
            if found is None:
                self.send_error(404)
                return
            if isinstance(found, list):
                data = "".join(f"data: {json.dumps(e)}\n\n" for e in found) + "data: [DONE]\n\n"
            else:
                data = found if isinstance(found, str) else json.dumps(found)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data.encode())))
            self.end_headers()
            self.wfile.write(data.encode())

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


MODELS = {"data": [{"id": "tiny", "owned_by": "someone"}]}


def test_a_server_like_vllm() -> None:
    """Token ids from the stream, counters by the end of their names, version from its page."""
    steps = iter(range(100))

    def metrics(_body: dict[str, Any]) -> str:
        k = next(steps)
        return (
            "# TYPE vllm:spec_decode_num_drafts_total counter\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {10 * k}.0\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {20 * k}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {9 * k}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {6 * k}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {3 * k}.0\n'
        )

    def completions(body: dict[str, Any]) -> list[dict[str, Any]]:
        assert body["return_token_ids"]
        assert body["model"] == "tiny"
        ids = [body["prompt"][-1] + i for i in range(body["max_tokens"])]
        top = {"logprobs": {"top_logprobs": [{"a": -0.25, "b": -1.5}]}}
        return [{"choices": [{"text": "x", "token_ids": [i], **top}]} for i in ids]

    pages: Pages = {
        "/v1/models": lambda _: MODELS, "/version": lambda _: {"version": "0.32.0"}, "/metrics": metrics,
        "/v1/completions": completions,
    }  # fmt: skip
    with fake(pages) as url:
        found = Server(url).run([Request((1, 2), 3, margins=True), Request((5,), 2)])
    assert found.engine == "vLLM 0.32.0"
    assert [c.tokens for c in found.completions] == [(2, 3, 4), (5, 6)]
    assert found.completions[0].margins == (1.25, 1.25, 1.25)
    assert found.completions[0].drafted is None
    assert found.counts == DraftCounts(10, 20, 9, (6, 3))


def test_a_server_like_sglang() -> None:
    def generate(body: dict[str, Any]) -> dict[str, Any]:
        count = body["sampling_params"]["max_new_tokens"]
        return {"text": "", "output_ids": list(range(count)), "meta_info": {"spec_verify_ct": 3}}

    pages: Pages = {
        "/v1/models": lambda _: MODELS, "/get_server_info": lambda _: {"version": "0.6"}, "/generate": generate,
    }  # fmt: skip
    with fake(pages) as url:
        found = Server(url).run([Request((1, 2), 8)])
    assert found.engine == "SGLang 0.6"
    assert found.completions[0].tokens == tuple(range(8))
    assert found.accepted == 5
    assert found.drafted is None


def test_a_server_without_token_ids() -> None:
    pages: Pages = {
        "/v1/models": lambda _: MODELS, "/v1/completions": lambda _: [{"choices": [{"text": "hello"}]}],
    }  # fmt: skip
    with fake(pages) as url, pytest.raises(EnvironmentFailure, match="no token ids"):
        Server(url).run([Request((1,), 2)])


@pytest.mark.parametrize(
    ("events", "words"), [([{"error": {"message": "it died"}}], "it died"), ([], "without a token")]
)
def test_a_server_that_fails_while_it_answers(events: list[Any], words: str) -> None:
    pages: Pages = {"/v1/models": lambda _: MODELS, "/v1/completions": lambda _: events}
    with fake(pages) as url, pytest.raises(EnvironmentFailure, match=words):
        Server(url).run([Request((1,), 2)])


def test_a_server_that_is_no_engine() -> None:
    with fake({}) as url, pytest.raises(EnvironmentFailure, match="no engine that is known"):
        Server(url)


def test_a_server_that_refuses_a_request() -> None:
    with fake({"/props": lambda _: {"build_info": "b1"}}) as url, pytest.raises(EnvironmentFailure, match="404"):
        Server(url).complete(Request((1,), 2))


def test_a_server_that_does_not_answer() -> None:
    def slow(_body: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1.5)
        return {}

    pages: Pages = {"/props": lambda _: {"build_info": "b1"}, "/completion": slow}
    with fake(pages) as url, pytest.raises(EnvironmentFailure, match="does not answer"):
        Server(url, timeout=0.3).complete(Request((1,), 2))


def test_impossible_counters() -> None:
    """More accepted than drafted, or a later position more often than an earlier one."""
    with pytest.raises(EnvironmentFailure, match="impossible"):
        parse_counts("x:spec_decode_num_draft_tokens_total 3\nx:spec_decode_num_accepted_tokens_total 4\n")
    positions = "".join(
        f'x:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}\n' for i, n in enumerate([1, 2])
    )
    with pytest.raises(EnvironmentFailure, match="impossible"):
        parse_counts("x:spec_decode_num_draft_tokens_total 9\nx:spec_decode_num_accepted_tokens_total 3\n" + positions)
    assert parse_counts("process_cpu_seconds_total 3.0\n") is None
