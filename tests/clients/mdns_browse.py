"""Browses _hearthnet._tcp with python-zeroconf, and prints what it resolves as JSON lines.

Usage: mdns_browse.py SECONDS [NODE_ID]

Ends as soon as the node is seen with addresses of both IP versions, or after SECONDS. Knows
nothing of HearthNet but the service type: what it prints is what any other program on the network
sees.
"""

import json
import queue
import sys
import time

from zeroconf import IPVersion, ServiceBrowser, ServiceStateChange, Zeroconf

SERVICE = "_hearthnet._tcp.local."


def main():
    limit = time.monotonic() + float(sys.argv[1])
    wanted = sys.argv[2] if len(sys.argv) > 2 else None
    events = queue.Queue()

    def changed(zeroconf, service_type, name, state_change):
        events.put((name, state_change))

    zeroconf = Zeroconf(ip_version=IPVersion.All)
    ServiceBrowser(zeroconf, SERVICE, handlers=[changed])
    try:
        while (left := limit - time.monotonic()) > 0:
            try:
                name, state = events.get(timeout=left)
            except queue.Empty:
                break
            if state == ServiceStateChange.Removed:
                print(json.dumps({"name": name, "removed": True}), flush=True)
                continue
            info = zeroconf.get_service_info(SERVICE, name, timeout=3000)
            if info is None:
                continue
            seen = {
                "name": name,
                "host": info.server,
                "port": info.port,
                "addresses": sorted(info.parsed_addresses()),
                "txt": {
                    key.decode(): None if value is None else value.decode()
                    for key, value in info.properties.items()
                },
            }
            print(json.dumps(seen), flush=True)
            if seen["txt"].get("node") == wanted:
                if any(":" in one for one in seen["addresses"]) and any(
                    "." in one for one in seen["addresses"]
                ):
                    return
                # A service is known with its first address. Those of the other IP version come in a
                # packet of their own, perhaps later.
                time.sleep(0.1)
                events.put((name, state))
    finally:
        zeroconf.close()


main()
