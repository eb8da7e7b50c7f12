"""``outrider doctor`` at the terminal: exit status, table, JSON, and a live server's counters."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.audit.doctor.test_metrics_text import VLLM
from tests.cli.conftest import Ran

Run = Callable[..., Ran]


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({"prompt": [40 + i, 50, 60, 70]}) + "\n" for i in range(5)))
    return path


def test_a_finding_is_status_1_with_evidence_and_advice(run: Run, tiny_gguf: Path, requests_file: Path) -> None:
    common = ("doctor", "-d", "random", "--target", tiny_gguf, "--dtype", "float32", "-f", requests_file, "-t", 12)
    ran = run(*common, "--no-speed", "--limit", 4)
    assert ran.status == 1 and not ran.err
    assert "unlike_model" in ran.out and "1. The draft model foresees little" in ran.out
    assert "evidence:" in ran.out and "what to do:" in ran.out and "4 requests" in ran.out
    ran = run(*common, "--json")
    [report] = ran.rows
    assert ran.status == 1 and not report["is_healthy"] and report["num_requests"] == 5
    assert report["findings"][0]["cause"] == "unlike_model" and report["speed"]["plain_ms"] > 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--draft is missing"),
        (("-d", "ngrm", "--offline"), "did you mean 'ngram'"),
        (("-d", "ngram", "-k", "0"), "num_draft_tokens 0 is not possible"),
        (("-d", "ngram", "--limit", "0"), "--limit 0 is not possible"),
        (("-d", "none"), "nothing to examine"),
        (("--metrics", "nowhere.txt"), "cannot be read"),
        (("--metrics", "http://127.0.0.1:1"), "does not answer"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    run: Run, tiny_gguf: Path, requests_file: Path, argv: tuple[str, ...], words: str
) -> None:
    ran = run("doctor", "--target", tiny_gguf, "--dtype", "float32", "-f", requests_file, *argv)
    assert ran.status == 2 and words in ran.err and ran.err.count("\n") == 1, ran


class _Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(VLLM.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metrics) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_counters_of_a_server_and_of_a_file(run: Run, server: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(VLLM)
    for source in (server, f"{server}/metrics", str(path)):
        ran = run("doctor", "--metrics", source, "--json")
        [report] = ran.rows
        assert ran.status == 0 and report["acceptance"]["accepted_length"] == 2.2
    ran = run("doctor", "--metrics", f"{server}/other")
    assert ran.status == 2 and "answered 404" in ran.err
