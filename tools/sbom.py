"""The software bill of materials of a wheel: CycloneDX 1.6 as JSON, for the folder `sboms` of its .dist-info (PEP 770).

It lists what is in the file: xtrain, the package that OpenBLAS comes from and the parts that its licence names, and
NVIDIA's CUDA run-time library where it is linked in. What pip installs beside xtrain is in METADATA.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from pathlib import Path
from typing import Any

NAME = "xtrain.cdx.json"
# A part as the licence file of scipy-openblas32 states it.
PART = re.compile(
    r"^Name: (?P<name>.+)\nFiles: .+\nDescription: (?P<description>.+)\n"
    r"Availability: (?P<url>.+)\nLicense: (?P<license>\S+)$",
    re.M,
)


def sha256(path: Path) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]


def licensed(name: str) -> list[dict[str, Any]]:
    return [{"license": {"id": name}}]


def component(name: str, reference: str, **more: Any) -> dict[str, Any]:
    return {"type": "library", "bom-ref": reference, "name": name, **more}


def openblas(folder: Path, version: str) -> list[dict[str, Any]]:
    """scipy-openblas32 with its library in `folder`, and inside it what its licence names."""
    text = (folder / "LICENSE.openblas.txt").read_text()
    library = folder / "libxtrain_blas.so"
    found = re.search(rb"OpenBLAS (\d[\w.]*)", library.read_bytes())
    parts = []
    for part in PART.finditer(text):
        entry = component(
            part["name"], f"openblas/{part['name'].lower().replace(' ', '-')}", description=part["description"]
        )
        if part["name"] == "OpenBLAS" and found:
            entry["version"] = found[1].decode()
        entry["licenses"] = licensed(part["license"])
        entry["externalReferences"] = [{"type": "vcs", "url": part["url"]}]
        parts.append(entry)
    if not parts:
        raise ValueError(f"{folder / 'LICENSE.openblas.txt'} must name the parts of OpenBLAS, and names none")
    purl = f"pkg:pypi/scipy-openblas32@{version}"
    what = "OpenBLAS, shipped as _lib/libxtrain_blas.so under a name of its own"
    package = component("scipy-openblas32", purl, version=version, description=what, purl=purl)
    return [{**package, "licenses": licensed("BSD-2-Clause"), "hashes": sha256(library), "components": parts}]


def cuda_runtime(library: Path, toolkit: str | None) -> list[dict[str, Any]]:
    what = "libcudart_static, linked into _lib/libxtrain_cuda.so; that file's hash"
    entry = component("NVIDIA CUDA Runtime", "nvidia/cudart", description=what, hashes=sha256(library))
    if toolkit:
        entry["version"] = toolkit
    return [{**entry, "licenses": [{"license": {"name": "NVIDIA CUDA Toolkit EULA"}}]}]


def document(package: Path, version: str, blas_version: str, toolkit: str | None, date: int) -> str:
    """The JSON text for the folder `package`, an unpacked xtrain/.

    version: of xtrain; blas_version: of scipy-openblas32; toolkit: of CUDA, None if unknown; date: seconds since 1970.
    """
    purl = f"pkg:pypi/xtrain@{version.replace('+', '%2B')}"
    (core,) = package.glob("_C.*.so")
    xtrain = component("xtrain", purl, version=version, purl=purl, licenses=licensed("MIT"), hashes=sha256(core))
    parts = openblas(package / "_lib", blas_version)
    cuda = package / "_lib/libxtrain_cuda.so"
    if cuda.exists():
        parts += cuda_runtime(cuda, toolkit)
    depends = [{"ref": purl, "dependsOn": [part["bom-ref"] for part in parts]}]
    body = {"components": parts, "dependencies": depends}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(date))
    content = json.dumps([xtrain, body, stamp], sort_keys=True)
    head = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",  # the same for the same wheel
        "version": 1,
        "metadata": {"timestamp": stamp, "component": xtrain},
    }
    return json.dumps({**head, **body}, indent=1) + "\n"
