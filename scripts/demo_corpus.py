"""Builds the corpus of the embedded model from Debian packages: six domains of prose and code, split by document.

    python scripts/demo_corpus.py --out FOLDER

Packages are fetched with the machine's own ``apt-get download`` (run ``apt-get update`` first) and read without being
installed. Writes ``DOMAIN.train.txt.xz``, ``DOMAIN.heldout.txt.xz`` (documents joined by NUL) and ``manifest.json``
(package versions, licences, sizes, checksums). The same package versions give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from demo_text import html_text, man_text, source_text

DOMAINS = ("english", "german", "french", "python", "c", "go")
PROSE = DOMAINS[:3]
HELDOUT_PERCENT = 5  # of documents, chosen by a hash of their text
MIN_CHARS = 400  # of a document
MAX_CHARS = {"html": 1_000_000, "man": 1_000_000, "source": 150_000}  # longer ones are generated or tables
REPEATED = 12  # a line of prose in more documents than this is page furniture
NEW_LINES = 0.4  # a document with a smaller share of lines not seen before is a near copy and left out
DOMAIN_CHARS = 48_000_000  # of training text kept per domain


@dataclass(frozen=True)
class Source:
    """Files of one package that belong to a domain. Of ``packages`` the first that this Debian release has is used."""

    domain: str
    packages: tuple[str, ...]
    path: str  # regular expression, searched in the path inside the package (or inside its source tarball)
    kind: str  # html | man | source
    license: str


LIBREOFFICE = "MPL-2.0"
GNOME = "CC-BY-SA-3.0"
HANDBOOK = "GPL-2+ or CC-BY-SA-3.0"
GPL2 = "GPL-2+"
MAN = "GPL-3+ and the licences of the pages"


def prose(domain: str, code: str, handbook: str) -> list[Source]:
    """Sources that exist in several human languages; ``code`` is the language's, ``handbook`` that with its country."""
    office = "en-us" if code == "en" else code
    help_code = "C" if code == "en" else code
    suffix = "" if code == "en" else f"-{code}"
    lily = "" if code == "en" else rf"\.{code}"
    return [
        Source(domain, (f"libreoffice-help-{office}",), r"/text/.*\.html$", "html", LIBREOFFICE),
        Source(domain, ("gnome-user-docs",), rf"/help/{help_code}/.*\.page$", "html", GNOME),
        Source(domain, ("evolution-common",), rf"/help/{help_code}/.*\.page$", "html", "CC-BY-SA-3.0 (help)"),
        Source(domain, ("debian-handbook",), rf"/html/{handbook}/sect\..*\.html$", "html", HANDBOOK),
        Source(domain, (f"debian-reference-{code}",), r"/(ch|ap)\w+\.\w+\.html$", "html", GPL2),
        Source(domain, (f"debian-edu-doc-{code}",), r"/debian-edu-bookworm-manual\.html$", "html", GPL2),
        Source(domain, (f"developers-reference{suffix}",), r"/(?!developers-reference)[\w-]+\.html$", "html", "GPL-2"),
        Source(domain, ("installation-guide-amd64",), rf"/{code}/(ch|ap)\w+\.html$", "html", "GPL-2"),
        Source(
            domain,
            (f"debian-faq{suffix}",),
            rf"/FAQ/({code}/)?(?!index)[\w.-]+\.html$",
            "html",
            "its own copyleft notice",
        ),
        Source(
            domain,
            (f"lilypond-doc-html{suffix}",),
            rf"/(learning|usage|notation|essay)/[^.]*{lily}\.html$",
            "html",
            "GFDL-1.3+",
        ),
    ]


SOURCES = [
    *prose("english", "en", "en-US"),
    *prose("german", "de", "de-DE"),
    *prose("french", "fr", "fr-FR"),
    Source("german", ("manpages-de",), r"/man/de/man\d/.*\.gz$", "man", MAN),
    Source("french", ("manpages-fr",), r"/man/fr/man\d/.*\.gz$", "man", MAN),
    Source("english", ("manpages",), r"/man/man\d/.*\.gz$", "man", "the licences of the pages"),
    Source("english", ("manpages-dev",), r"/man/man\d/.*\.gz$", "man", "the licences of the pages"),
    Source(
        "english", ("postgresql-doc-15", "postgresql-doc-17"), r"/html/(?!bookindex)[\w-]+\.html$", "html", "PostgreSQL"
    ),
    Source("english", ("git-doc",), r"/git-doc/[\w/-]+\.html$", "html", "GPL-2"),
    Source(
        "english",
        ("python3.11-doc", "python3.13-doc"),
        r"/html/(library|howto|tutorial|faq|reference)/.*\.html$",
        "html",
        "PSF-2.0",
    ),
    *(
        Source("python", names, r"^(?!.*/tests?/).*/(?!test_)[^/]*\.py$", "source", license)
        for names, license in (
            (("libpython3.11-stdlib", "libpython3.13-stdlib"), "PSF-2.0"),
            (("python3-django",), "BSD-3-Clause"),
            (("python3-sympy",), "BSD-3-Clause"),
            (("python3-sklearn",), "BSD-3-Clause"),
            (("python3-pandas",), "BSD-3-Clause"),
            (("python3-networkx",), "BSD-3-Clause"),
            (("python3-twisted",), "Expat"),
            (("python3-sqlalchemy",), "Expat"),
            (("python3-matplotlib",), "PSF-based"),
            (("python3-scipy",), "BSD-3-Clause"),
            (("python3-numpy",), "BSD-3-Clause"),
        )
    ),
    Source("c", ("glibc-source",), r"^(?!.*/(localedata|tests?)/).*/(?!tst-|test-)[^/]*\.[ch]$", "source", "LGPL-2.1+"),
    Source("c", ("newlib-source",), r"/(newlib|libgloss)/.*\.[ch]$", "source", "BSD-3-Clause and the like"),
    Source(
        "go", ("golang-1.19-src", "golang-1.24-src"), r"/src/(?!.*testdata).*(?<!_test)\.go$", "source", "BSD-3-Clause"
    ),
]

EXTRACT = {"html": html_text, "man": man_text, "source": source_text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write; packages are kept in its deb/")
    out = parser.parse_args().out
    (out / "deb").mkdir(parents=True, exist_ok=True)
    by_deb: dict[Path, list[Source]] = {}
    for source in SOURCES:
        by_deb.setdefault(fetch(source.packages, out / "deb"), []).append(source)
    found: dict[str, set[str]] = {domain: set() for domain in DOMAINS}
    parts: dict[str, str] = {}
    with ProcessPoolExecutor() as pool:
        for deb, texts_by_domain in zip(by_deb, pool.map(extract, by_deb, by_deb.values())):
            for domain, texts in texts_by_domain.items():
                found[domain].update(texts)
                size = sum(map(len, texts)) / 1e6
                print(f"{domain:8} {package(deb)[0]:26} {len(texts):6} documents {size:6.1f} M characters", flush=True)
        for domain, texts in zip(found, pool.map(split, found.values(), found)):
            parts |= {f"{domain}.{part}": text for part, text in texts.items()}
        for (name, text), packed in zip(parts.items(), pool.map(compress, parts.values())):
            (out / f"{name}.txt.xz").write_bytes(packed)
            print(f"{name:18} {len(text.encode()) / 1e6:6.1f} MB, {len(packed) / 1e6:5.1f} MB compressed", flush=True)
    manifest = {
        "packages": {
            name: {"version": version, "license": sources[0].license}
            for (name, version), sources in zip(map(package, by_deb), by_deb.values())
        },
        "files": {
            name: {"bytes": len(text.encode()), "documents": text.count("\0") + 1, "sha256": sha256(text)}
            for name, text in parts.items()
        },
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def package(deb: Path) -> tuple[str, str]:
    """(name, version) of a package file."""
    name, version, _ = deb.name.split("_")
    return name, version.replace("%3a", ":")


def fetch(names: tuple[str, ...], folder: Path) -> Path:
    """The package file of the first of ``names`` that is there or can be fetched."""
    for name in names:
        if not list(folder.glob(f"{name}_*.deb")):
            subprocess.run(
                ["apt-get", "download", "-qq", "-oAPT::Sandbox::User=root", name],
                cwd=folder,
                check=False,
                stderr=subprocess.DEVNULL,
            )
        if found := sorted(folder.glob(f"{name}_*.deb")):
            return found[-1]
    sys.exit(f"none of {', '.join(names)} could be fetched; run apt-get update, or use the Debian release of the card")


def extract(deb: Path, sources: list[Source]) -> dict[str, list[str]]:
    """Domain -> texts of one package."""
    wanted = [(source, re.compile(source.path)) for source in sources]
    texts: dict[str, list[str]] = {source.domain: [] for source in sources}
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], check=True, stdout=subprocess.PIPE).stdout
    for path, read in members(tar):
        for source, pattern in wanted:
            if pattern.search(path):
                text = EXTRACT[source.kind](read(), path)
                if MIN_CHARS <= len(text) <= MAX_CHARS[source.kind]:
                    texts[source.domain].append(text)
    return texts


def members(tar: bytes) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(path, its reader) of every file of a package, those of a source tarball inside it included."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in archive:
            if member.name.endswith(".tar.xz"):
                yield from members(archive.extractfile(member).read())
            elif member.isfile():
                yield member.name, archive.extractfile(member).read


def split(found: set[str], domain: str) -> dict[str, str]:
    """``{"train": text, "heldout": text}`` of one domain; order and membership follow from the texts alone."""
    texts = sorted(found, key=sha256)
    if domain in PROSE:
        texts = drop_repeated_lines(texts)
    texts = drop_near_copies(texts)
    held = [int(sha256(text)[:8], 16) % 100 < HELDOUT_PERCENT for text in texts]
    train, size = [], 0
    for text in (text for text, is_held in zip(texts, held) if not is_held):
        size += len(text)
        if size > DOMAIN_CHARS:
            break
        train.append(text)
    return {"train": "\0".join(train), "heldout": "\0".join(text for text, is_held in zip(texts, held) if is_held)}


def drop_near_copies(texts: list[str]) -> list[str]:
    """Texts with enough lines (of 12 characters or more) that no earlier text has."""
    seen: set[int] = set()
    kept = []
    for text in texts:
        lines = [hash(line.strip()) for line in text.split("\n") if len(line.strip()) >= 12]
        if sum(line not in seen for line in lines) >= NEW_LINES * max(1, len(lines)):
            kept.append(text)
        seen.update(lines)
    return kept


def drop_repeated_lines(texts: list[str]) -> list[str]:
    seen = Counter(line for text in texts for line in set(text.split("\n")) if line)
    kept = ["\n".join(line for line in text.split("\n") if seen[line] <= REPEATED) for text in texts]
    kept = [re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for text in kept]
    return [text for text in kept if len(text) >= MIN_CHARS]


def compress(text: str) -> bytes:
    return lzma.compress(text.encode(), preset=3)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()
