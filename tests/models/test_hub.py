"""Models of the hub by their id: the library's own cache, a hub that is played by a folder, and no network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monoplan.ir.errors import LoadError
from monoplan.models import AutoLlamaModel, open_model
from monoplan.models.load import hub
from tests.models.support import tiny_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")
ID = "someone/tiny-llama"


class FakeHub:
    """As much of huggingface_hub as is used, with a folder for each repository and a cache of its form."""

    errors = errors

    def __init__(self, root: Path) -> None:
        self.remote, self.cache, self.calls = root / "remote", root / "cache", 0
        self.online = True

    def snapshot_download(
        self, repo: str, revision: Any = None, local_files_only: bool = False, allow_patterns: Any = None
    ) -> str:
        folder = self.cache / repo / (revision or "main")
        if local_files_only:
            if not folder.is_dir():
                raise errors.LocalEntryNotFoundError("not in the cache")
            return str(folder)
        for name in allow_patterns:
            self.fetch(repo, name, folder)
        return str(folder)

    def hf_hub_download(self, repo: str, name: str, revision: Any = None) -> str:
        return str(self.fetch(repo, name, self.cache / repo / (revision or "main")))

    def fetch(self, repo: str, name: str, folder: Path) -> Path:
        assert self.online
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(self.remote / repo / name, folder / name))

    def HfApi(self) -> FakeHub:  # noqa: N802  (the library's name)
        return self

    def model_info(self, repo: str, revision: Any = None, timeout: float = 0) -> Any:
        self.calls += 1
        if not self.online:
            raise ConnectionError("a long story\n[Errno -2] Name or service not known")
        files = [p.relative_to(self.remote / repo) for p in (self.remote / repo).rglob("*") if p.is_file()]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=str(name)) for name in sorted(files)])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path)
    tiny_checkpoint(made.remote / ID)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "onnx/model.safetensors"):
        (made.remote / ID / name).parent.mkdir(exist_ok=True)
        (made.remote / ID / name).write_text("not wanted")
    find = hub._find
    monkeypatch.setattr(hub, "_find", lambda _, *rest: find(made, *rest))
    monkeypatch.chdir(tmp_path)
    return made


def test_a_model_is_fetched_once_and_then_found_without_a_network(fake: FakeHub, tmp_path: Path) -> None:
    model = AutoLlamaModel.from_pretrained(ID)
    assert model.name_or_path == ID and model.tokenizer.chat_template is not None
    own = AutoLlamaModel.from_pretrained(fake.remote / ID)
    assert model.generate_ids([1, 2, 3], 6) == own.generate_ids([1, 2, 3], 6)
    names = {p.name for p in (fake.cache / ID / "main").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    fake.online = False
    assert open_model(ID).config == own.config and fake.calls == 1
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_bytes() == (fake.remote / ID / "tokenizer.json").read_bytes()


def test_what_was_fetched_in_part_is_fetched_again(fake: FakeHub) -> None:
    folder = fake.cache / ID / "main"
    for missing in ("model.safetensors", "model-00002-of-00002.safetensors"):
        path = hub.local_path(ID)
        (path / "model.safetensors").unlink()
        if missing != "model.safetensors":
            index = {"weight_map": {"a": "model.safetensors", "b": missing}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        before = fake.calls
        assert (hub.local_path(ID) / "model.safetensors").is_file() and fake.calls == before + 1


def test_update_looks_for_a_newer_version(fake: FakeHub) -> None:
    path = hub.local_path(ID)
    (fake.remote / ID / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert not (hub.local_path(ID) / "generation_config.json").exists()
    assert hub.local_path(ID, update=True) == path and "7" in (path / "generation_config.json").read_text()
    assert hub.local_path(f"{ID}@v1.0").name == "v1.0"


def test_files_of_a_repository_of_gguf_files(fake: FakeHub) -> None:
    folder = fake.remote / "someone/files"
    folder.mkdir()
    (folder / "a.Q4_1.gguf").write_bytes(b"GGUF")
    assert hub.local_path("someone/files").name == "a.Q4_1.gguf"
    (folder / "b.gguf").write_bytes(b"GGUF")
    assert hub.local_path("someone/files/b.gguf").name == "b.gguf"
    with pytest.raises(LoadError, match="2 GGUF files in the repository") as caught:
        hub.local_path("someone/files", update=True)
    assert "someone/files/a.Q4_1.gguf, someone/files/b.gguf" in caught.value.fix
    for file in folder.iterdir():
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(LoadError, match="neither safetensors nor GGUF"):
        hub.local_path("someone/files", update=True)


def test_paths_are_no_ids(fake: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    for path in ("org/name", "./a/b", "/a/b", "a", "a/b/c", "a/b.gguf", "a/b.py", "../a", "~/a", "a/.b"):
        assert hub.local_path(path) == Path(path)
    assert fake.calls == 0


def test_errors_in_words(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.online = False
    with pytest.raises(LoadError, match="there is no such model here") as caught:
        AutoLlamaModel.from_pretrained(ID)
    assert caught.value.why == "no such path exists, and the hub can't be reached: [Errno -2] Name or service not known"

    class Answer:
        headers: dict[str, str] = {}
        request = None

    for error, words in (
        (errors.RepositoryNotFoundError("404", response=Answer()), "the hub has no such repository"),
        (errors.GatedRepoError("403", response=Answer()), "the model has terms to accept first"),
        (errors.RevisionNotFoundError("404", response=Answer()), "the repository has no such revision"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE forbids to fetch it"),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(fake, "model_info", fail)
        with pytest.raises(LoadError, match=words):
            hub.local_path(ID)


def test_the_library_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its real cache, laid out by hand, and its real errors."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = tmp_path / "hub" / f"models--{ID.replace('/', '--')}"
    tiny_checkpoint(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert hub.local_path(ID) == place / "snapshots" / commit
    with pytest.raises(LoadError, match="it is not in the cache, and HF_HUB_OFFLINE forbids to fetch it"):
        hub.local_path("someone/else")


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"\[hub\]'"):
        hub.local_path(ID)
