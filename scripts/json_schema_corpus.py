"""Packs JSON-Schema-Test-Suite (github.com/json-schema-org/JSON-Schema-Test-Suite, MIT) for tests/server/hostile.

Run: python scripts/json_schema_corpus.py CHECKOUT COMMIT
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
"""The drafts that llguidance supports, and how a schema names them."""
TARGET = Path(__file__).parents[1] / "tests/server/hostile/json_schema_test_suite.json.gz"


def main(checkout: Path, commit: str) -> None:
    """Write every schema of the drafts once, with its instances."""
    found: dict[str, dict[str, object]] = {}
    for draft in DRAFTS:
        for path in sorted((checkout / "tests" / draft).glob("*.json")):
            for case in json.loads(path.read_text()):
                schema = case["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": DRAFTS[draft], **schema}
                key = json.dumps([schema, case["tests"]], sort_keys=True)
                found.setdefault(
                    key,
                    {
                        "name": f"{draft}/{path.stem}: {case['description']}",
                        "schema": schema,
                        "tests": [[test["data"], test["valid"]] for test in case["tests"]],
                    },
                )
    suite = {
        "source": f"https://github.com/json-schema-org/JSON-Schema-Test-Suite at {commit}",
        "license": (checkout / "LICENSE").read_text(),
        "cases": list(found.values()),
    }
    with TARGET.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as packed:
        packed.write(json.dumps(suite, separators=(",", ":")).encode())
    print(f"{len(found)} schemas in {TARGET.name}, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
