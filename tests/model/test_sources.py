"""Where configs come from, and what is said when none is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from hfopt.errors import WorkloadError
from hfopt.model.sources import find_config


def test_an_unknown_model_says_what_was_tried_and_how_to_help() -> None:
    with pytest.raises(WorkloadError) as caught:
        find_config("nobody/no-such-model-here")
    message = str(caught.value)
    assert "bundled table" in message and "offline" in message and "cache" in message
    assert "config.json" in (caught.value.hint or "")


def test_a_re_upload_is_taken_for_its_namesake_and_that_is_said() -> None:
    source = find_config("some-mirror/Llama-3.2-1B-Instruct")
    assert source.fields["model_type"] == "llama" and "meta-llama/Llama-3.2-1B-Instruct" in (source.note or "")


@pytest.mark.parametrize(
    ("name", "taken_for", "said"),
    [
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B", None),
        ("some-mirror/Qwen2.5-7B-Instruct-unsloth-bnb-4bit", "Qwen/Qwen2.5-7B-Instruct", None),
        ("acme/Meta-Llama-3-8B-Instruct-AWQ", "meta-llama/Meta-Llama-3-8B-Instruct", "how AWQ packs its weights is not modelled"),
        ("acme/Meta-Llama-3-8B-Instruct-AQLM-2Bit-1x16", "meta-llama/Meta-Llama-3-8B-Instruct", "how AQLM packs"),
    ],
)
def test_a_packed_model_is_the_one_it_was_made_from(name: str, taken_for: str, said: str | None) -> None:
    note = find_config(name).note or ""
    assert f"taken for {taken_for} by its name" in note
    assert (said is None) == ("not modelled" not in note) and (said or "") in note


def test_a_slip_gets_a_suggestion() -> None:
    with pytest.raises(WorkloadError, match="Did you mean google-bert/bert-base-uncased"):
        find_config("bert-base-uncassed")


def test_an_unknown_model_proposes_the_known_one_it_looks_like() -> None:
    with pytest.raises(WorkloadError, match="unknown model") as caught:
        find_config("acme/OpenHermes-9-Mistral-7B")
    assert caught.value.hint == "acme/OpenHermes-9-Mistral-7B looks like mistralai/Mistral-7B-v0.1: --like mistralai/Mistral-7B-v0.1"


def test_no_model_of_another_size_is_proposed() -> None:
    with pytest.raises(WorkloadError) as caught:
        find_config("mistralai/Codestral-23B-v0.1")
    assert "Mistral-7B" not in str(caught.value) + (caught.value.hint or "")


def test_a_missing_folder_proposes_by_its_name(tmp_path: Path) -> None:
    missing = find_hint(f"{tmp_path}/sft-qwen2.5-7b")
    (tmp_path / "Llama-2-7b-hf").mkdir()
    assert "--like Qwen/Qwen2.5-7B" in missing and "--like meta-llama/Llama-2-7b-hf" in find_hint(f"{tmp_path}/Llama-2-7b-hf")


def find_hint(name: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        find_config(name)
    return caught.value.hint or ""


def test_like_gives_an_unknown_model_a_known_architecture_and_says_so() -> None:
    source = find_config("acme/secret-7b", like="mistralai/Mistral-7B-v0.1")
    assert source.name == "acme/secret-7b" and source.fields["model_type"] == "mistral"
    assert source.note == "acme/secret-7b is taken for mistralai/Mistral-7B-v0.1 (--like): its config was not found"


def test_like_does_not_replace_a_config_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    source = find_config(str(tmp_path), like="mistralai/Mistral-7B-v0.1")
    assert source.fields == {"model_type": "bert"} and source.note is None


def test_like_does_not_hide_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WorkloadError, match="cannot be read"):
        find_config(str(tmp_path), like="mistralai/Mistral-7B-v0.1")


def test_like_itself_must_be_known() -> None:
    with pytest.raises(WorkloadError, match="unknown model 'nobody/nothing'"):
        find_config("acme/secret-7b", like="nobody/nothing")


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"holds no config\.json"):
        find_config(str(tmp_path))


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read"), ("[1]", "holds a list"), ("", "cannot be read")])
def test_a_broken_config_is_said(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WorkloadError, match=words):
        find_config(str(tmp_path))


def test_a_missing_path_is_not_asked_of_the_hub() -> None:
    with pytest.raises(WorkloadError, match="no such folder") as caught:
        find_config("./runs/checkpoint-500")
    assert "Hub" not in str(caught.value)


def test_the_hub_cache_is_read_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "bert"}')
    refs = tmp_path / "models--acme--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    source = find_config("acme/tiny")
    assert source.where == "Hub cache" and source.fields["model_type"] == "bert"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A Hub on this machine that answers every question with one status; 0 is a Hub that is not there."""
    answers: list[int] = []
    servers: list[HTTPServer] = []

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(answers[-1])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def start(status: int) -> None:
        server = HTTPServer(("127.0.0.1", 0), Answer)
        servers.append(server)
        answers.append(status)
        if status:
            Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda *_: f"http://127.0.0.1:{server.server_port}/config.json")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    yield start
    for server, status in zip(servers, answers, strict=True):
        if status:
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize(
    ("status", "words"), [(404, "404: no such model"), (403, "licence"), (500, "could not serve"), (0, "could not be reached")]
)
def test_what_the_hub_answers_is_said(hub: Callable[[int], None], capfd: pytest.CaptureFixture[str], status: int, words: str) -> None:
    hub(status)
    with pytest.raises(WorkloadError, match=words) as caught:
        find_config("acme/unheard-of")
    assert "bundled table" in str(caught.value) and "config.json" in str(caught.value.hint)
    assert capfd.readouterr().err == "", "one message, not the client's own"


@pytest.mark.parametrize("name", ["no..such", "-model", "a b"])
def test_what_no_name_on_the_hub_can_be_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.urlopen", None)
    with pytest.raises(WorkloadError, match="not a valid hub id"):
        find_config(name)


@pytest.mark.parametrize(
    ("name", "taken_for"),
    [
        ("/mnt/disk/models/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("../weights/Llama-3.1-8B-Instruct/", "meta-llama/Llama-3.1-8B-Instruct"),
        ("/scratch/cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abc", "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_a_folder_on_another_machine_is_known_by_its_name(name: str, taken_for: str) -> None:
    source = find_config(name)
    assert source.taken_for == taken_for and "by its name" in (source.note or "")


@pytest.mark.parametrize("name", ["/mnt/disk/out/final", "/mnt/disk/models/Qwen2.5-7B-Instruct-ours", "./sft/checkpoint-500"])
def test_a_folder_of_another_name_is_not_guessed(name: str) -> None:
    with pytest.raises(WorkloadError, match="unknown model"):
        find_config(name)
