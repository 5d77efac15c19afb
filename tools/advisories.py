"""Asks for known advisories of what pyproject.toml names, at the versions installed; `make advisories` calls it.

    python tools/advisories.py [--service URL]

PyPI's JSON API is asked, whose key "vulnerabilities" has what OSV knows of a version. scipy-openblas32 is among them:
the OpenBLAS that a wheel ships is a copy of its library. A line each; the exit status is 1 after an advisory, else 2
after an answer that cannot be read and where the service stops answering. Where it cannot be reached at all, or knows
no version, one line says so.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SERVICE, SECONDS, MOST = "https://pypi.org/pypi", 20, 1 << 25  # for an answer, and bytes of one


def named() -> list[str]:
    """The packages that the build, the library and its extras name."""
    content = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text("utf-8"))
    project = content["project"]
    lists = [content["build-system"]["requires"], project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[\w.-]+", one)[0] for some in lists for one in some}  # type: ignore[index]
    return sorted(names - {project["name"]}, key=str.lower)


def ask(service: str, name: str, version: str) -> list[str] | None:
    """The advisories of a version, one text each; None where it is not known. ValueError: a broken answer."""
    try:
        with urllib.request.urlopen(f"{service}/{name}/{version}/json", timeout=SECONDS) as answer:
            found: Any = json.loads(answer.read(MOST))["vulnerabilities"]
        listed = [(one["id"], one.get("fixed_in") or ["none"], one.get("withdrawn")) for one in found]
        return [f"{number}, fixed in {', '.join(fixed)}" for number, fixed, withdrawn in listed if not withdrawn]
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise ValueError(f"status {error.code}") from None
    except (KeyError, TypeError, AttributeError, RecursionError, http.client.HTTPException) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", default=SERVICE, help=f"[default: {SERVICE}]")
    service, status, known = parser.parse_args(arguments).service, 0, False
    names, reached = named(), False
    for place, name in enumerate(names, 1):
        try:
            version = metadata.version(name)
            found = ask(service, name, version.partition("+")[0])  # torch 2.11.0+cpu is 2.11.0 there
        except metadata.PackageNotFoundError:
            print(f"{name}: not installed, not asked for")
        except ValueError as error:
            print(f"{name} {version}: broken answer: {ascii(str(error))[:200]}")
            status, reached = status or 2, True
        except OSError as error:
            if not reached:
                print(f"the service cannot be reached: {service}: {error}")
                return 0
            print(f"stopped at {name}; {len(names) - place} not asked for: {service}: {error}")
            return status or 2
        else:
            said = "not known there" if found is None else ascii("; ".join(found))[1:-1] or "no advisory"
            print(f"{name} {version}: {said}")
            status, known, reached = 1 if found else status, known or found is not None, True
    if not (known or status):
        print(f"the service cannot be reached: {service} knows none of these versions")
    return status


if __name__ == "__main__":
    sys.exit(main())
