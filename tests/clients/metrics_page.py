"""Reads /metrics as Prometheus does, with its own parser.

Usage: metrics_page.py METRICS_URL. Prints one JSON object: `values`, of NAME{LABEL="VALUE",...} to
number, with labels in order; `types`, of names to types; and what /healthz says.
"""

import json
import sys
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def get(url):
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.headers["Content-Type"], response.read().decode()


def main(url):
    kind, text = get(url)
    assert kind.startswith("text/plain; version=0.0.4"), kind
    values, types = {}, {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, f"{family.name} is not described"
        types[family.name] = family.type
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in values, f"{name} twice"
            values[name] = sample.value
    _, health = get(url.removesuffix("/metrics") + "/healthz")
    print(json.dumps({"values": values, "types": types, "health": json.loads(health)}))


if __name__ == "__main__":
    main(sys.argv[1])
