#!/usr/bin/env python3
"""Downloads llama.cpp's vocabulary tests and chat templates into the user's cache, for
crates/hearthnet-tokens/tests/vocabularies.rs and templates.rs.

usage: vocabularies.py [FOLDER]

They are part of the source distribution of llama-cpp-python on the Python package index. pip downloads
a source distribution only if it can also build its metadata, which would need a C compiler's whole
tool chain. This script therefore downloads the file itself, from the index that pip is configured for.
"""
import base64
import hashlib
import json
import os
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

PROJECT = "llama-cpp-python"
FILE = "llama_cpp_python-0.3.36.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
MODELS = "llama_cpp_python-0.3.36/vendor/llama.cpp/models/"
VOCABULARIES = MODELS + "ggml-vocab-"
# Each has the licence of its model, so none is part of this repository.
TEMPLATES = MODELS + "templates/"
# No vocabulary is larger than 16 MiB.
LIMIT = 64 << 20


def pip_settings():
    """pip's settings, from its files and the environment: {"index-url": ..., "cert": ...}."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = {}
    # pip reads `global` first, then the command's own section, then the environment.
    order = {"global": 0, "install": 1, "download": 2, ":env:": 3}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        value = value.strip("'\"")
        if section in order and order[section] >= settings.get(name, (-1, ""))[0]:
            settings[name] = (order[section], value)
    return {name: value for name, (_, value) in settings.items()}


def request(url, accept="*/*"):
    """A request with the user and password of the address moved into its header."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    asked = urllib.request.Request(parts._replace(netloc=host).geturl(), headers={"Accept": accept})
    if parts.username is not None:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        asked.add_unredirected_header("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())
    return asked


class Links(HTMLParser):
    """The addresses on a page of an index that serves only HTML."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def address(index, opened):
    """Address of the file in the index; None if it is missing."""
    page_url = index.rstrip("/") + f"/{PROJECT}/"
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
    with opened(request(page_url, accept)) as page:
        kind = page.headers.get_content_type()
        text = page.read().decode()
    if kind.endswith("+json"):
        links = [file["url"] for file in json.loads(text)["files"]]
    else:
        parser = Links()
        parser.feed(text)
        links = parser.found
    for link in links:
        url = urllib.parse.urljoin(page_url, link)
        parts = urllib.parse.urlsplit(url)
        if parts.path.rpartition("/")[2] == FILE:
            base = urllib.parse.urlsplit(page_url)
            if parts.netloc == base.netloc.rpartition("@")[2]:
                parts = parts._replace(netloc=base.netloc)
            return parts._replace(fragment="").geturl()
    return None


def download(into):
    """Fetches the source distribution and checks its hash."""
    settings = pip_settings()
    context = ssl.create_default_context(cafile=settings.get("cert"))
    handlers = [urllib.request.HTTPSHandler(context=context)]
    if "proxy" in settings:
        proxies = {"http": settings["proxy"], "https": settings["proxy"]}
        handlers.append(urllib.request.ProxyHandler(proxies))
    opener = urllib.request.build_opener(*handlers)

    def opened(asked):
        return opener.open(asked, timeout=float(settings.get("timeout", 60)))

    indexes = [settings.get("index-url", "https://pypi.org/simple")]
    indexes += settings.get("extra-index-url", "").split()
    for index in indexes:
        try:
            url = address(index, opened)
        except urllib.error.URLError as error:
            # The message omits the address, which may hold a password.
            print(f"an index of pip's configuration does not answer: {error.reason}", file=sys.stderr)
            continue
        if url is None:
            continue
        digest = hashlib.sha256()
        with opened(request(url)) as answer:
            while piece := answer.read(1 << 20):
                digest.update(piece)
                into.write(piece)
        if digest.hexdigest() != SHA256:
            raise SystemExit(f"{FILE} is not what it was: its SHA-256 is {digest.hexdigest()}")
        into.seek(0)
        return
    raise SystemExit(f"no package index that pip is configured for has {FILE}")


def unpack(archive, folder):
    """Extracts vocabularies and templates from the archive, each whole or not at all."""
    (folder / "templates").mkdir(exist_ok=True)
    with tarfile.open(fileobj=archive, mode="r:gz") as files:
        for member in files:
            template = member.name.startswith(TEMPLATES) and member.name.endswith(".jinja")
            if not member.isfile() or not (template or member.name.startswith(VOCABULARIES)):
                continue
            name = Path(member.name).name
            if member.size > LIMIT:
                raise SystemExit(f"{name} is unreasonably large")
            target = folder / "templates" if template else folder
            partial = target / f".{name}.partial"
            partial.write_bytes(files.extractfile(member).read())
            partial.rename(target / name)


def main():
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = Path(cache) / "hearthnet" / "test-models" / "vocabularies"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    # Written last, so a folder that has it is complete. Without the suffix it has no templates.
    done = folder / (FILE.removesuffix(".tar.gz") + "-templates")
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as archive:
        download(archive)
        unpack(archive, folder)
    done.touch()


main()
